"""Paged KV cache: writing new keys and values into it, and the index tensors that say where.

A paged KV cache is a tuple (K, V) of ``[pages, page_size, heads, dim]`` tensors (layout ``"HND"``: ``[pages, heads,
page_size, dim]``), or one 5-D tensor with K and V at dimension 1. All strides are free but the last, which is 1; K and
V may differ in strides and in ``dim``. Request ``b`` owns pages ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``; its
last page holds ``kv_last_page_len[b]`` tokens, the others are full. Index tensors are int32 or int64.

Errors: `ValueError` for a shape, dtype, stride, device or index that does not fit, before anything is written;
`NotImplementedError` for a tensor that is neither on CPU nor on a CUDA device. Index tensors on a CUDA device are not
checked, since that would have to wait for the GPU: there a token is skipped if its request, position, page or slot does
not exist.
"""

from __future__ import annotations

import math

import torch

from flashinfer_core._checks import (
    FLOAT_DTYPES,
    FP8_DTYPES,
    INDEX_DTYPES,
    check_int,
    check_tensor,
    split_paged_kv_cache,
)
from flashinfer_core._page import (
    run_append_paged_kv,
    run_batch_indices_positions,
    run_seq_lens,
    run_write_kv_slots,
)

_CACHE_DTYPES = (*FLOAT_DTYPES, *FP8_DTYPES)


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
        another and into FP8, rounding to nearest even; what is too large for FP8 becomes its largest number.
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
    device = k_cache.device
    check_tensor("batch_indices", batch_indices, dtypes=INDEX_DTYPES, ndim=1, device=device)
    tokens = batch_indices.shape[0]
    check_tensor("positions", positions, dtypes=INDEX_DTYPES, shape=(tokens,), device=device)
    check_tensor("kv_indices", kv_indices, dtypes=INDEX_DTYPES, ndim=1, device=device)
    check_tensor("kv_last_page_len", kv_last_page_len, dtypes=INDEX_DTYPES, ndim=1, device=device)
    check_tensor("kv_indptr", kv_indptr, dtypes=INDEX_DTYPES, shape=(kv_last_page_len.shape[0] + 1,), device=device)
    _check_stream("append_key", append_key, tokens, "paged_kv_cache", k_cache, None, device)
    _check_stream("append_value", append_value, tokens, "paged_kv_cache", v_cache, None, device)
    run_append_paged_kv(
        append_key, append_value, k_cache, v_cache, batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len
    )


def write_kv_slots(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
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
    k_scale, v_scale
        An FP8 cache stores ``key / k_scale`` and ``value / v_scale``; None is 1. A number, or a float32 tensor of one
        element on the cache's device.
    """
    scales = check_kv_slots(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    run_write_kv_slots(key, value, k_cache, v_cache, slot_mapping, *scales)


def check_kv_slots(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float | torch.Tensor | None,
    v_scale: float | torch.Tensor | None,
) -> tuple[float, torch.Tensor | None, float, torch.Tensor | None]:
    """Check the arguments of `write_kv_slots` and return the scales as those of `run_write_kv_slots`."""
    check_tensor("slot_mapping", slot_mapping, dtypes=INDEX_DTYPES, ndim=1)
    device = slot_mapping.device
    _check_stream("key", key, None, "k_cache", k_cache, (None, None, None, None), device)
    _check_stream("value", value, None, "v_cache", v_cache, (*k_cache.shape[:3], None), device)
    tokens = slot_mapping.shape[0]
    if key.shape[0] < tokens or value.shape[0] < tokens:
        name, rows = ("key", key.shape[0]) if key.shape[0] < tokens else ("value", value.shape[0])
        raise ValueError(f"{name}: expected at least {tokens} rows, one for each entry of slot_mapping, got {rows}")
    return (*_check_scale("k_scale", k_scale, key, k_cache), *_check_scale("v_scale", v_scale, value, v_cache))


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
        Length of the result, at least ``append_indptr[-1]`` (on a CUDA device what is longer is cut off). Entries past
        that get request -1 and position 0.
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
    device = seq_lens.device
    check_tensor("append_indptr", append_indptr, dtypes=INDEX_DTYPES, shape=(seq_lens.shape[0] + 1,), device=device)
    nnz = check_int("nnz", nnz, 0)
    batch_indices = _int32_output("batch_indices", batch_indices, nnz, device)
    positions = _int32_output("positions", positions, nnz, device)
    run_batch_indices_positions(append_indptr, seq_lens, batch_indices, positions)
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
    device = kv_last_page_len.device
    check_tensor("kv_indptr", kv_indptr, dtypes=INDEX_DTYPES, shape=(kv_last_page_len.shape[0] + 1,), device=device)
    page_size = check_int("page_size", page_size, 1)
    out = torch.empty(kv_last_page_len.shape, dtype=torch.int32, device=device)
    run_seq_lens(kv_indptr, kv_last_page_len, page_size, out)
    return out


def _check_stream(
    name: str,
    x: torch.Tensor,
    tokens: int | None,
    cache_name: str,
    cache: torch.Tensor,
    cache_shape: tuple[int | None, ...] | None,
    device: torch.device,
) -> None:
    """Check keys (or values) and their cache."""
    check_tensor(
        cache_name,
        cache,
        dtypes=_CACHE_DTYPES,
        shape=cache_shape,
        last_dim_contiguous=True,
        writable=True,
        device=device,
    )
    _, _, heads, dim = cache.shape
    shape = (tokens, heads, dim)
    check_tensor(name, x, dtypes=_CACHE_DTYPES, shape=shape, last_dim_contiguous=True, device=device)
    if x.dtype != cache.dtype and x.dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name}: expected dtype {cache.dtype}, that of {cache_name}, got {x.dtype}")


def _check_scale(
    name: str, scale: float | torch.Tensor | None, x: torch.Tensor, cache: torch.Tensor
) -> tuple[float, torch.Tensor | None]:
    """Return the scale as a number and a tensor, of which one says 1."""
    if scale is None or (isinstance(scale, (int, float)) and scale == 1):
        return 1.0, None
    if cache.dtype not in FP8_DTYPES or x.dtype == cache.dtype:
        raise ValueError(f"{name}: expected None or 1 for a cache that holds {cache.dtype} as given, got {scale!r}")
    if isinstance(scale, torch.Tensor):
        check_tensor(name, scale, dtypes=(torch.float32,), device=cache.device)
        if scale.numel() != 1:
            raise ValueError(f"{name}: expected one element, got shape {list(scale.shape)}")
        return 1.0, scale
    if not 0 < scale < math.inf:
        raise ValueError(f"{name}: expected a positive number, got {scale}")
    return float(scale), None


def _int32_output(name: str, t: torch.Tensor | None, size: int, device: torch.device) -> torch.Tensor:
    if t is None:
        return torch.empty(size, dtype=torch.int32, device=device)
    check_tensor(name, t, dtypes=(torch.int32,), shape=(size,), writable=True, device=device)
    return t
