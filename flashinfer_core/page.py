"""Paged KV cache: writing new keys and values into it, and the index tensors that say where.

A paged KV cache is a tuple (K, V) of ``[pages, page_size, heads, dim]`` tensors (layout ``"HND"``: ``[pages, heads,
page_size, dim]``), or one 5-D tensor with K and V at dimension 1. All strides are free but the last, which is 1; K and
V may differ in strides and in ``dim``. Request ``b`` owns pages ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``; its
last page holds ``kv_last_page_len[b]`` tokens, the others are full. Index tensors are int32 or int64.

Errors: `ValueError` for a shape, dtype, stride or index, before anything is written; `NotImplementedError` for a tensor
that is not on CPU.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from flashinfer_core import _native
from flashinfer_core._checks import (
    DTYPE_CODES,
    FLOAT_DTYPES,
    INDEX_DTYPES,
    check_int,
    check_tensor,
    indices_arg,
    split_paged_kv_cache,
)
from flashinfer_core._ops import native_op

# Bytes of an FP8 cache are copied, never converted.
_CACHE_DTYPES = (*FLOAT_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)
_Stream: TypeAlias = tuple[int, int, bool, int, int, int, int, int, int, int, int, int]


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Write new keys and values to their positions in a paged KV cache.

    Parameters
    ----------
    append_key, append_value
        ``[tokens, heads, dim]``, of the cache's dtype. Float32, float16 and bfloat16 are also converted into one
        another.
    batch_indices
        ``[tokens]``: the request of each token, in any order; -1 for padding, which is skipped.
    positions
        ``[tokens]``: the position of each token in its request, different for each token of a request.
    paged_kv_cache
        The cache, float32, float16, bfloat16, float8_e4m3fn or float8_e5m2.
    kv_indices
        The pages of all requests; it may be longer than ``kv_indptr[-1]``.
    kv_indptr
        ``[batch + 1]``.
    kv_last_page_len
        ``[batch]``. Like kv_indices and kv_indptr it already counts the new tokens: a position past the end that it
        states is refused.
    kv_layout
        ``"NHD"`` or ``"HND"``.
    """
    k_cache, v_cache = split_paged_kv_cache("paged_kv_cache", paged_kv_cache, kv_layout)
    check_tensor("batch_indices", batch_indices, dtypes=INDEX_DTYPES, ndim=1)
    tokens = batch_indices.shape[0]
    check_tensor("positions", positions, dtypes=INDEX_DTYPES, shape=(tokens,))
    check_tensor("kv_indices", kv_indices, dtypes=INDEX_DTYPES, ndim=1)
    check_tensor("kv_last_page_len", kv_last_page_len, dtypes=INDEX_DTYPES, ndim=1)
    check_tensor("kv_indptr", kv_indptr, dtypes=INDEX_DTYPES, shape=(kv_last_page_len.shape[0] + 1,))
    _check_stream("append_key", append_key, tokens, "paged_kv_cache", k_cache, None)
    _check_stream("append_value", append_value, tokens, "paged_kv_cache", v_cache, None)
    _run_append_paged_kv(
        append_key, append_value, k_cache, v_cache, batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len
    )


def write_kv_slots(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write keys and values to given slots of a paged KV cache: the engines' form of `append_paged_kv_cache`.

    Parameters
    ----------
    key, value
        ``[rows, heads, dim]`` with at least as many rows as ``slot_mapping``; rows past those are ignored.
    k_cache, v_cache
        ``[pages, page_size, heads, dim]``.
    slot_mapping
        ``[tokens]``: ``page * page_size + slot_in_page`` of each token; a negative one skips the token.
    """
    check_tensor("slot_mapping", slot_mapping, dtypes=INDEX_DTYPES, ndim=1)
    _check_stream("key", key, None, "k_cache", k_cache, (None, None, None, None))
    _check_stream("value", value, None, "v_cache", v_cache, (*k_cache.shape[:3], None))
    tokens = slot_mapping.shape[0]
    if key.shape[0] < tokens or value.shape[0] < tokens:
        name, rows = ("key", key.shape[0]) if key.shape[0] < tokens else ("value", value.shape[0])
        raise ValueError(f"{name}: expected at least {tokens} rows, one for each entry of slot_mapping, got {rows}")
    _run_write_kv_slots(key, value, k_cache, v_cache, slot_mapping)


def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the request and the position of each appended token, as `append_paged_kv_cache` takes them.

    The tokens of a request are its last ones: positions ``seq_lens[b] - appended`` to ``seq_lens[b] - 1``.

    Parameters
    ----------
    append_indptr
        ``[batch + 1]``, from 0: tokens ``append_indptr[b]`` to ``append_indptr[b + 1] - 1`` belong to request ``b``.
    seq_lens
        ``[batch]``: tokens of each request, the appended ones included.
    nnz
        Length of the result, at least ``append_indptr[-1]``. Entries past that get request -1 and position 0.
    batch_indices, positions
        Where to store the result, ``[nnz]`` int32; allocated if None.

    Returns
    -------
    ``batch_indices`` and ``positions``.

    Examples
    --------
    >>> get_batch_indices_positions(torch.tensor([0, 1, 3]), torch.tensor([5, 5]), 3)
    (tensor([0, 1, 1], dtype=torch.int32), tensor([4, 3, 4], dtype=torch.int32))
    """
    check_tensor("seq_lens", seq_lens, dtypes=INDEX_DTYPES, ndim=1)
    check_tensor("append_indptr", append_indptr, dtypes=INDEX_DTYPES, shape=(seq_lens.shape[0] + 1,))
    nnz = check_int("nnz", nnz, 0)
    batch_indices = _int32_output("batch_indices", batch_indices, nnz)
    positions = _int32_output("positions", positions, nnz)
    _run_batch_indices_positions(append_indptr, seq_lens, batch_indices, positions)
    return batch_indices, positions


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the number of tokens of each request, ``[batch]`` int32: 0 without pages, whatever kv_last_page_len says.

    Parameters
    ----------
    kv_indptr
        ``[batch + 1]``.
    kv_last_page_len
        ``[batch]``, from 1 to page_size for a request that owns pages.
    page_size
        Tokens of a page.
    """
    check_tensor("kv_last_page_len", kv_last_page_len, dtypes=INDEX_DTYPES, ndim=1)
    check_tensor("kv_indptr", kv_indptr, dtypes=INDEX_DTYPES, shape=(kv_last_page_len.shape[0] + 1,))
    page_size = check_int("page_size", page_size, 1)
    out = torch.empty(kv_last_page_len.shape, dtype=torch.int32, device=kv_last_page_len.device)
    _run_seq_lens(kv_indptr, kv_last_page_len, page_size, out)
    return out


def _check_stream(
    name: str,
    x: torch.Tensor,
    tokens: int | None,
    cache_name: str,
    cache: torch.Tensor,
    cache_shape: tuple[int | None, ...] | None,
) -> None:
    """Check keys (or values) and their cache."""
    check_tensor(cache_name, cache, dtypes=_CACHE_DTYPES, shape=cache_shape, last_dim_contiguous=True, writable=True)
    _, _, heads, dim = cache.shape
    check_tensor(name, x, dtypes=_CACHE_DTYPES, shape=(tokens, heads, dim), last_dim_contiguous=True)
    if x.dtype != cache.dtype and not (x.dtype in DTYPE_CODES and cache.dtype in DTYPE_CODES):
        raise ValueError(f"{name}: expected dtype {cache.dtype}, that of {cache_name}, got {x.dtype}")


def _int32_output(name: str, t: torch.Tensor | None, size: int) -> torch.Tensor:
    if t is None:
        return torch.empty(size, dtype=torch.int32, device="cpu")
    check_tensor(name, t, dtypes=(torch.int32,), shape=(size,), writable=True)
    return t


@native_op(
    "Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor batch_indices, Tensor positions, "
    "Tensor kv_indices, Tensor kv_indptr, Tensor kv_last_page_len"
)
def _run_append_paged_kv(
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
    pages, page_size, heads, _ = k_cache.shape
    _native.append_paged_kv(
        heads,
        pages,
        page_size,
        _stream(key, k_cache),
        _stream(value, v_cache),
        indices_arg(batch_indices),
        indices_arg(positions),
        indices_arg(kv_indices),
        indices_arg(kv_indptr),
        indices_arg(kv_last_page_len),
    )


@native_op("Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping")
def _run_write_kv_slots(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    pages, page_size, heads, _ = k_cache.shape
    streams = _stream(key, k_cache), _stream(value, v_cache)
    _native.write_kv_slots(heads, pages, page_size, *streams, indices_arg(slot_mapping))


@native_op("Tensor append_indptr, Tensor seq_lens, Tensor(a!) batch_indices, Tensor(b!) positions")
def _run_batch_indices_positions(
    append_indptr: torch.Tensor, seq_lens: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor
) -> None:
    _native.batch_indices_positions(
        indices_arg(append_indptr),
        indices_arg(seq_lens),
        batch_indices.shape[0],
        batch_indices.data_ptr(),
        batch_indices.stride()[0],
        positions.data_ptr(),
        positions.stride()[0],
    )


@native_op("Tensor kv_indptr, Tensor kv_last_page_len, int page_size, Tensor(a!) out")
def _run_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int, out: torch.Tensor) -> None:
    _native.seq_lens(indices_arg(kv_indptr), indices_arg(kv_last_page_len), page_size, out.data_ptr())


def _stream(x: torch.Tensor, cache: torch.Tensor) -> _Stream:
    """Return the native form of keys (or values) and their cache."""
    token_stride, head_stride, _ = x.stride()
    page_stride, slot_stride, cache_head_stride, _ = cache.stride()
    return (
        DTYPE_CODES.get(x.dtype, 0), DTYPE_CODES.get(cache.dtype, 0), x.dtype is cache.dtype, x.element_size(),
        x.shape[2], x.data_ptr(), token_stride, head_stride,
        cache.data_ptr(), page_stride, slot_stride, cache_head_stride,
    )  # fmt: skip
