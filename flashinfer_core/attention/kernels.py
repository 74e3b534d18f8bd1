"""The CUDA kernels of attention: their specs, and the loaded kernel for what a run asks of it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from flashinfer_core import _native, jit
from flashinfer_core._checks import DTYPE_CODES
from flashinfer_core.attention.tiles import SM90_TILES, Sm90Tile, Tile, choose_tile, ctas_per_sm

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
    """Return the spec of the universal kernel for a GPU with so much shared memory."""
    dim_qk, dim_vo = variant.dim_qk, variant.dim_vo
    tile = choose_tile(variant.tile, dim_qk, dim_vo, variant.kv_bytes, smem.of_cta)
    min_ctas = ctas_per_sm(tile, dim_qk, dim_vo, variant.kv_bytes, smem.of_sm)
    shape = (tile.warps_m, tile.warps_kv, tile.rows_per_warp, tile.block_keys, tile.stages, min_ctas)
    return _spec("attention_sm80", tile.name, variant, shape)


def attention_sm90_spec(variant: Variant) -> jit.KernelSpec:
    """Return the spec of the kernel for SM90."""
    tile = SM90_TILES[variant.dim_qk, variant.dim_vo]
    shape = (tile.rows // 16, tile.warps_kv, 16, tile.block_keys, tile.stages, 1)
    return _spec("attention_sm90", f"k{tile.block_keys}", variant, shape)


def _spec(kernel: str, tile: str, variant: Variant, shape: tuple[int, ...]) -> jit.KernelSpec:
    q, kv, out, dim_qk, dim_vo, _, features = variant
    name = f"{kernel}_{_NAMES[q]}_d{dim_qk}_{tile}"
    if kv != q:
        name += f"_kv{_NAMES[kv]}"
    if dim_vo != dim_qk:
        name += f"_vo{dim_vo}"
    if out != q:
        name += f"_o{_NAMES[out]}"
    name += "".join(f"_{feature.replace('_', '')}" for feature, used in features._asdict().items() if used)
    macros = ("WARPS_M", "WARPS_KV", "ROWS_PER_WARP", "BLOCK_KEYS", "STAGES", "MIN_CTAS")
    return jit.KernelSpec(
        name,
        f"attention/{kernel}.cuh",
        (
            ("FIC_Q_DTYPE", DTYPE_CODES[q]),
            ("FIC_KV_DTYPE", DTYPE_CODES[kv]),
            ("FIC_O_DTYPE", DTYPE_CODES[out]),
            ("FIC_DIM_QK", dim_qk),
            ("FIC_DIM_VO", dim_vo),
            *((f"FIC_{macro}", value) for macro, value in zip(macros, shape, strict=True)),
            *((f"FIC_{feature.upper()}", int(used)) for feature, used in features._asdict().items()),
        ),
    )


def merge_spec(variant: Variant, smem: Smem) -> jit.KernelSpec:
    """Return the spec of the kernel that merges what an attention kernel with tiles of many rows leaves."""
    out, dim = variant.o_dtype, variant.dim_vo
    number = out if out in Q_DTYPES else torch.float16  # nothing of the queries or keys matters
    alike = Variant(number, number, out, dim, dim, variant.tile, Features(direct=variant.features.direct))
    spec = attention_spec(alike, smem)
    direct = "_direct" if variant.features.direct else ""
    name = f"merge_chunks_{_NAMES[out]}_d{dim}_{variant.tile}{direct}"
    return jit.KernelSpec(name, "attention/merge_chunks.cuh", spec.defines)


class Kernel(NamedTuple):
    """A compiled kernel of attention, and how it is launched."""

    spec: jit.KernelSpec
    tile: Tile | Sm90Tile
    ctas: int  # of an SM
    smem_bytes: int  # of a CTA
    merge: jit.KernelSpec | None  # the kernel after it; None: it merges by itself


def kernel_of(variant: Variant, smem: Smem, sm90: bool) -> Kernel:
    """Return the kernel for SM90, or the universal one for a GPU with so much shared memory."""
    dims = variant.dim_qk, variant.dim_vo
    if sm90:
        shape = SM90_TILES[dims]
        return Kernel(attention_sm90_spec(variant), shape, 1, shape.smem_bytes(*dims), merge_spec(variant, smem))
    tile = choose_tile(variant.tile, *dims, variant.kv_bytes, smem.of_cta)
    ctas = ctas_per_sm(tile, *dims, variant.kv_bytes, smem.of_sm)
    smem_bytes = tile.smem_bytes(*dims, variant.kv_bytes)
    merge = merge_spec(variant, smem) if tile.warps_kv == 1 else None
    return Kernel(attention_spec(variant, smem), tile, ctas, smem_bytes, merge)


@functools.cache
def load_attention(variant: Variant, device: int, sm90: bool) -> _native.AttentionKernel:
    """Return the kernel for SM90 or the universal one, ready to launch; the first call for a variant may compile it."""
    kernel = kernel_of(variant, smem_of(device), sm90)
    return _native.AttentionKernel(
        jit.load(kernel.spec, device),
        kernel.ctas * _native.cuda_device(device).num_sms,
        kernel.tile.threads,
        kernel.smem_bytes,
        None if kernel.merge is None else jit.load(kernel.merge, device),
        *((kernel.tile.block_keys, variant.dim_qk, variant.dim_vo) if sm90 else ()),
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


def smem_of_capability(capability: int) -> Smem:
    """Return the shared memory of a GPU of a compute capability such as 90."""
    return _SMEM[max(known for known in _SMEM if known <= capability)]


def specs(arch: str) -> Iterator[jit.KernelSpec]:
    """Yield the kernels in common use for an architecture such as ``"90a"``: those that a bundle holds."""
    yield SCHEDULE
    capability = int(arch.rstrip("a"))
    smem = smem_of_capability(capability)
    for dtype in Q_DTYPES if capability >= 80 else (torch.float16,):
        for dim in (64, 128, 256) if capability >= 80 else (64, 128):
            for tile in ("m16", "m64", "m128"):
                features = Features(direct=capability < 80)
                variant = Variant(dtype, dtype, dtype, dim, dim, tile, features)
                yield attention_spec(variant, smem)
                if tile != "m16":
                    yield merge_spec(variant, smem)
    if capability == 90:
        for dtype in Q_DTYPES:
            for dims in SM90_TILES:
                yield attention_sm90_spec(Variant(dtype, dtype, dtype, *dims, "m128"))
