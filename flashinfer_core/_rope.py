"""The rotary embedding's operators and kernels, behind `flashinfer_core.rope`, which has checked the arguments."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import TypeAlias

import torch

from flashinfer_core import _native
from flashinfer_core._checks import DTYPE_CODES, indices_arg
from flashinfer_core._launch import COMMON_DTYPES, DTYPE_NAMES, Spec, cuda_call, fits_vectors
from flashinfer_core._ops import native_op

_Heads: TypeAlias = tuple[int, int, int, int, int, int, int]
_Rope: TypeAlias = tuple[int, ...]  # see core_kernels/host/bind_ops.cpp

MAX_ROTARY_DIM = 2 * _native.MAX_ROPE_FREQUENCIES
"""On a GPU, where frequencies travel as arguments of the kernel."""

MAX_CACHED_DIM = (48 << 10) // 4
"""On a GPU, where a token's cosines and sines lie in shared memory."""


@native_op(
    "Tensor q, Tensor k, Tensor(a!) q_out, Tensor(b!) k_out, Tensor? pos_ids, Tensor? indptr, Tensor? offsets, "
    "int rotary_dim, bool interleave, float[] scaling"
)
def run_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    pos_ids: torch.Tensor | None,
    indptr: torch.Tensor | None,
    offsets: torch.Tensor | None,
    rotary_dim: int,
    interleave: bool,
    scaling: list[float],
) -> None:
    """Rotate tokens by positions, given as such (`pos_ids`) or as those of a ragged batch."""
    frequencies = _frequencies(rotary_dim, *scaling)
    rope, vectors = _arguments(q, k, q_out, k_out, rotary_dim, interleave)
    call = cuda_call(q, _spec, q.dtype, interleave, False, vectors=vectors)
    if pos_ids is not None:
        _native.rope_pos_ids(call, rope, indices_arg(pos_ids), frequencies.data_ptr())
    elif indptr is not None and offsets is not None:
        _native.rope_indptr(call, rope, indices_arg(indptr), indices_arg(offsets), frequencies.data_ptr())


@native_op(
    "Tensor q, Tensor k, Tensor(a!) q_out, Tensor(b!) k_out, Tensor positions, Tensor cos_sin_cache, bool interleave"
)
def run_rope_cached(
    q: torch.Tensor,
    k: torch.Tensor,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    interleave: bool,
) -> None:
    """Rotate tokens by rows of a table."""
    cached_positions, rotary_dim = cos_sin_cache.shape
    rope, vectors = _arguments(q, k, q_out, k_out, rotary_dim, interleave)
    stride = cos_sin_cache.stride()[0]
    call = cuda_call(q, _spec, q.dtype, interleave, True, vectors=vectors)
    _native.rope_cached(call, rope, indices_arg(positions), cos_sin_cache.data_ptr(), cached_positions, stride)


def _arguments(
    q: torch.Tensor, k: torch.Tensor, q_out: torch.Tensor, k_out: torch.Tensor, rotary_dim: int, interleave: bool
) -> tuple[_Rope, bool]:
    """Return the native form of a call's heads, and whether they allow 16-byte accesses."""
    tokens, _, head_dim = q.shape
    a, b = _heads(q, q_out), _heads(k, k_out)
    addresses = a[0] | a[3] | b[0] | b[3]
    strides = a[1] | a[2] | a[4] | a[5] | b[1] | b[2] | b[4] | b[5]
    vectors = fits_vectors(addresses, strides | head_dim | rotary_dim // 2, q.itemsize)
    return (DTYPE_CODES[q.dtype], interleave, tokens, head_dim, rotary_dim, *a, *b), vectors


def _heads(x: torch.Tensor, out: torch.Tensor) -> _Heads:
    token, head, _ = x.stride()
    out_token, out_head, _ = out.stride()
    return x.data_ptr(), token, head, out.data_ptr(), out_token, out_head, x.shape[1]


def _spec(dtype: torch.dtype, interleave: bool, cached: bool, vectors: bool) -> Spec:
    pairs, angles = "interleaved" if interleave else "halves", "cached" if cached else "computed"
    return Spec(
        f"rope_{pairs}_{angles}_{DTYPE_NAMES[dtype]}{'' if vectors else '_scalar'}",
        "rope/rope.cuh",
        (
            ("FIC_DTYPE", DTYPE_CODES[dtype]),
            ("FIC_INTERLEAVE", int(interleave)),
            ("FIC_CACHED", int(cached)),
            ("FIC_VECTORS", int(vectors)),
        ),
    )


def specs(arch: str) -> Iterator[Spec]:
    """Yield the kernels in common use for an architecture."""
    for dtype in COMMON_DTYPES:
        for interleave in (False, True):
            for cached in (False, True):
                yield _spec(dtype, interleave, cached, True)


@lru_cache(maxsize=256)
def _frequencies(rotary_dim: int, rope_scale: float, rope_theta: float, *llama31: float) -> torch.Tensor:
    """Radians a position of each pair, ``[rotary_dim / 2]`` float32; made once for each set of parameters."""
    for name, value in (("rope_scale", rope_scale), ("rope_theta", rope_theta)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name}: expected a positive number, got {value}")
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / max(rotary_dim, 1)
    frequencies = rope_theta**-exponents
    if not llama31:
        return (frequencies / rope_scale).float()
    low, high, old_context_len = llama31
    if not 0 < low < high:
        raise ValueError(f"high_freq_factor: expected more than low_freq_factor = {low} > 0, got {high}")
    if not old_context_len > 0:
        raise ValueError(f"old_context_len: expected a positive number, got {old_context_len}")
    turns = old_context_len * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (frequencies * (kept + (1 - kept) / rope_scale)).float()
