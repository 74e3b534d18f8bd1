"""The CUDA kernels of attention: their specs, and the loaded kernel for what a run asks of it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from flashinfer_core import _native, jit
from flashinfer_core._checks import DTYPE_CODES
from flashinfer_core.attention.tiles import choose_tile, ctas_per_sm

SCHEDULE = jit.KernelSpec("schedule_attention", "attention/schedule.cuh")
Q_DTYPES = (torch.float16, torch.bfloat16)
_NAMES = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}


class Smem(NamedTuple):
    """Bytes of shared memory: all that a CTA can have, and all of an SM."""

    of_cta: int
    of_sm: int


# By compute capability; one that is not listed has what the one before it has.
_SMEM = {
    capability: Smem(of_cta * 1024, of_sm * 1024)
    for capability, of_cta, of_sm in (
        (75, 64, 64),
        (80, 163, 164),
        (86, 99, 100),
        (87, 163, 164),
        (89, 99, 100),
        (90, 227, 228),
        (120, 99, 100),
    )
}


class Features(NamedTuple):
    """What changes a score or the way to it; each needs code of its own in the kernel."""

    direct: bool = False  # K and V through registers: rows that do not begin at multiples of 16 bytes, and rotation
    soft_cap: bool = False
    alibi: bool = False
    mask: bool = False
    rope: bool = False


class Variant(NamedTuple):
    """The parameters of one compiled attention kernel."""

    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    o_dtype: torch.dtype
    dim_qk: int
    dim_vo: int
    tile: str  # as `tile_name` returns it
    features: Features = Features()

    @property
    def kv_bytes(self) -> int:
        """Bytes of an element of K and V in shared memory, where FP8 that came through registers is 16-bit."""
        return 2 if self.features.direct else self.kv_dtype.itemsize


def attention_spec(variant: Variant, smem: Smem) -> jit.KernelSpec:
    """Return the spec of an attention kernel for a GPU with so much shared memory."""
    q, kv, out, dim_qk, dim_vo, _, features = variant
    tile = choose_tile(variant.tile, dim_qk, dim_vo, variant.kv_bytes, smem.of_cta)
    name = f"attention_sm80_{_NAMES[q]}_d{dim_qk}_{tile.name}"
    if kv != q:
        name += f"_kv{_NAMES[kv]}"
    if dim_vo != dim_qk:
        name += f"_vo{dim_vo}"
    if out != q:
        name += f"_o{_NAMES[out]}"
    name += "".join(f"_{feature.replace('_', '')}" for feature, used in features._asdict().items() if used)
    return jit.KernelSpec(
        name,
        "attention/attention_sm80.cuh",
        (
            ("FIC_Q_DTYPE", DTYPE_CODES[q]),
            ("FIC_KV_DTYPE", DTYPE_CODES[kv]),
            ("FIC_O_DTYPE", DTYPE_CODES[out]),
            ("FIC_DIM_QK", dim_qk),
            ("FIC_DIM_VO", dim_vo),
            ("FIC_WARPS_M", tile.warps_m),
            ("FIC_WARPS_KV", tile.warps_kv),
            ("FIC_ROWS_PER_WARP", tile.rows_per_warp),
            ("FIC_BLOCK_KEYS", tile.block_keys),
            ("FIC_STAGES", tile.stages),
            ("FIC_MIN_CTAS", ctas_per_sm(tile, dim_qk, dim_vo, variant.kv_bytes, smem.of_sm)),
            *((f"FIC_{feature.upper()}", int(used)) for feature, used in features._asdict().items()),
        ),
    )


@functools.cache
def load_attention(variant: Variant, device: int) -> _native.AttentionKernel:
    """Return an attention kernel, ready to launch on a GPU; the first call for a variant may compile it."""
    smem = smem_of(device)
    tile = choose_tile(variant.tile, variant.dim_qk, variant.dim_vo, variant.kv_bytes, smem.of_cta)
    kernel = jit.load(attention_spec(variant, smem), device)
    return _native.AttentionKernel(
        kernel, tile.threads, tile.smem_bytes(variant.dim_qk, variant.dim_vo, variant.kv_bytes)
    )


@functools.cache
def load_schedule(device: int) -> _native.CudaKernel:
    """Return the kernel that turns lengths into a work list, ready to launch on a GPU."""
    return jit.load(SCHEDULE, device)


@functools.cache
def smem_of(device: int) -> Smem:
    """Return the shared memory of a GPU."""
    gpu = _native.cuda_device(device)
    return Smem(gpu.max_smem_per_block, gpu.max_smem_per_sm)


def specs(arch: str) -> Iterator[jit.KernelSpec]:
    """Yield the kernels in common use for an architecture such as ``"90a"``: those that a bundle holds."""
    yield SCHEDULE
    capability = int(arch.rstrip("a"))
    smem = _SMEM[max(known for known in _SMEM if known <= capability)]
    for dtype in Q_DTYPES if capability >= 80 else (torch.float16,):
        for dim in (64, 128, 256) if capability >= 80 else (64, 128):
            for tile in ("m16", "m64", "m128"):
                features = Features(direct=capability < 80)
                variant = Variant(dtype, dtype, dtype, dim, dim, tile, features)
                yield attention_spec(variant, smem)
