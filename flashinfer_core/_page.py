"""The paged cache's operators and kernels, behind `flashinfer_core.page`, which has checked the arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch

from flashinfer_core import _native
from flashinfer_core._checks import DTYPE_CODES, FP8_DTYPES, indices_arg
from flashinfer_core._launch import COMMON_DTYPES, DTYPE_NAMES, Call, Spec, cuda_call, fits_vectors
from flashinfer_core._ops import native_op

_Stream: TypeAlias = tuple[int, int, bool, int, int, int, int, int, int, int, int, int, int]

_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
_COPIED_AS = {dtype.itemsize: code for dtype, code in DTYPE_CODES.items()}
"""By size, the code of a dtype: what bytes mean does not matter to a copy."""

_CONVERTED = 8
"""Elements that a thread converts at a time; a thread that copies takes 16 bytes."""


@native_op(
    "Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor batch_indices, Tensor positions, "
    "Tensor kv_indices, Tensor kv_indptr, Tensor kv_last_page_len"
)
def run_append_paged_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    """Write keys and values to positions of requests."""
    pages, page_size, heads, _ = k_cache.shape
    keys, values = _stream(key, k_cache), _stream(value, v_cache)
    _native.append_paged_kv(
        _append_call(key, keys),
        _append_call(value, values),
        heads,
        pages,
        page_size,
        keys,
        values,
        indices_arg(batch_indices),
        indices_arg(positions),
        indices_arg(kv_indices),
        indices_arg(kv_indptr),
        indices_arg(kv_last_page_len),
    )


@native_op(
    "Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, float k_scale, "
    "Tensor? k_scale_tensor, float v_scale, Tensor? v_scale_tensor"
)
def run_write_kv_slots(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float,
    k_scale_tensor: torch.Tensor | None,
    v_scale: float,
    v_scale_tensor: torch.Tensor | None,
) -> None:
    """Write keys and values to slots."""
    pages, page_size, heads, _ = k_cache.shape
    keys, values = _stream(key, k_cache, k_scale_tensor), _stream(value, v_cache, v_scale_tensor)
    calls = _append_call(key, keys), _append_call(value, values)
    slots = indices_arg(slot_mapping)
    _native.write_kv_slots(*calls, heads, pages, page_size, keys, k_scale, values, v_scale, slots)


@native_op("Tensor append_indptr, Tensor seq_lens, Tensor(a!) batch_indices, Tensor(b!) positions")
def run_batch_indices_positions(
    append_indptr: torch.Tensor, seq_lens: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor
) -> None:
    """Write the request and the position of each appended token."""
    _native.batch_indices_positions(
        cuda_call(append_indptr, _index_spec, "batch_positions"),
        indices_arg(append_indptr),
        indices_arg(seq_lens),
        batch_indices.shape[0],
        batch_indices.data_ptr(),
        batch_indices.stride()[0],
        positions.data_ptr(),
        positions.stride()[0],
    )


@native_op("Tensor kv_indptr, Tensor kv_last_page_len, int page_size, Tensor(a!) out")
def run_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int, out: torch.Tensor) -> None:
    """Write the number of tokens of each request."""
    call = cuda_call(out, _index_spec, "seq_lens")
    _native.seq_lens(call, indices_arg(kv_indptr), indices_arg(kv_last_page_len), page_size, out.data_ptr())


def _stream(x: torch.Tensor, cache: torch.Tensor, scale: torch.Tensor | None = None) -> _Stream:
    """Return the native form of keys (or values) and their cache."""
    token_stride, head_stride, _ = x.stride()
    page_stride, slot_stride, cache_head_stride, _ = cache.stride()
    return (
        DTYPE_CODES[x.dtype], DTYPE_CODES[cache.dtype], x.dtype is cache.dtype, x.itemsize,
        x.shape[2], x.data_ptr(), token_stride, head_stride,
        cache.data_ptr(), page_stride, slot_stride, cache_head_stride,
        0 if scale is None else scale.data_ptr(),
    )  # fmt: skip


def _append_call(x: torch.Tensor, stream: _Stream) -> Call:
    in_code, cache_code, same, size, dim, address, token, head, cache, page, slot, cache_head, _ = stream
    if same:
        code = _COPIED_AS[size]
        vectors = fits_vectors(address | cache, token | head | page | slot | cache_head | dim, size)
        return cuda_call(x, _append_spec, code, code, vectors=vectors)
    cache_size = _DTYPES[cache_code].itemsize
    vectors = (
        dim % _CONVERTED == 0
        and fits_vectors(address, token | head, size)
        and fits_vectors(cache, page | slot | cache_head, cache_size, min(16, _CONVERTED * cache_size))
    )
    return cuda_call(x, _append_spec, in_code, cache_code, vectors=vectors)


def _append_spec(in_code: int, cache_code: int, vectors: bool) -> Spec:
    names = DTYPE_NAMES[_DTYPES[in_code]], DTYPE_NAMES[_DTYPES[cache_code]]
    how = f"copy{_DTYPES[in_code].itemsize}" if in_code == cache_code else "_".join(names)
    return Spec(
        f"append_{how}{'' if vectors else '_scalar'}",
        "page/append.cuh",
        (("FIC_IN_DTYPE", in_code), ("FIC_CACHE_DTYPE", cache_code), ("FIC_VECTORS", int(vectors))),
    )


def _index_spec(name: str, vectors: bool) -> Spec:
    return Spec(name, f"page/{name}.cuh")


def specs(arch: str) -> Iterator[Spec]:
    """Yield the kernels in common use for an architecture."""
    for code in _COPIED_AS.values():
        yield _append_spec(code, code, True)
    for dtype in COMMON_DTYPES:
        for fp8 in FP8_DTYPES:
            yield _append_spec(DTYPE_CODES[dtype], DTYPE_CODES[fp8], True)
    yield _index_spec("batch_positions", True)
    yield _index_spec("seq_lens", True)
