"""The tensors of a run of attention: checked once for all runs whose tensors are alike."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from flashinfer_core import _native
from flashinfer_core._checks import DTYPE_CODES, FLOAT_DTYPES, FP8_DTYPES, check_tensor
from flashinfer_core.attention.dispatch import MAX_STRIDE
from flashinfer_core.attention.kernels import Q_DTYPES

Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Signature = tuple[object, ...]


@dataclass(frozen=True)
class Layout:
    """What follows from tensors that were checked: one object, so that threads never see half of it."""

    signature: Signature
    native: _native.TensorLayout
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    aligned: bool  # whether the rows of tensors that begin at a multiple of 16 bytes do so too
    mapped: bool  # whether a tensor map of SM90 can have the strides of K and V
    num_pages: int  # of K; without pages tokens
    v_offset: int  # in bytes from K to V, where one tensor holds both
    kernels: dict[tuple[bool, ...], _native.AttentionKernel] = field(default_factory=dict)  # on a GPU, by `Features`


def signature_of(q: torch.Tensor, cache: Cache, out: torch.Tensor | None) -> Signature:
    """Return all of the tensors that is checked, as the caller brought them; nothing if one is no tensor.

    K and V are not split first: views would cost more than all else here. `out` is None if it was made as planned,
    which leaves nothing to check.
    """
    try:
        first = (q.shape, q.stride(), q.dtype, q.device)
        last = () if out is None else (out.shape, out.stride(), out.dtype, out.device)
        if isinstance(cache, torch.Tensor):
            return (first, last, cache.shape, cache.stride(), cache.dtype, cache.device)
        k, v = cache
        return (first, last, k.shape, k.stride(), k.dtype, k.device, v.shape, v.stride(), v.dtype, v.device)
    except (AttributeError, TypeError, ValueError):
        return ()


def addresses_of(cache: Cache, layout: Layout) -> tuple[int, int]:
    """Return the addresses of K and V."""
    if isinstance(cache, torch.Tensor):
        address = cache.data_ptr()
        return address, address + layout.v_offset
    k, v = cache
    return k.data_ptr(), v.data_ptr()


def check_layout(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    signature: Signature,
    *,
    kv_name: str,
    device: torch.device,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim_qk: int,
    head_dim_vo: int,
    page_size: int | None,
    num_queries: int,
    kv_extent: int,
) -> Layout:
    """Check the tensors of a run against a plan.

    Parameters
    ----------
    q, k, v, out, kv_name
        See `AttentionPlan.run`.
    signature
        The `signature_of` the tensors.
    device, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size
        What was planned.
    num_queries, kv_extent
        Rows of q, and pages (without pages: tokens) of K and V, that the plan uses, as far as the host knows.
    """
    on_gpu = device.type != "cpu"
    slots = () if page_size is None else (page_size,)
    unit = "tokens" if page_size is None else "pages"
    kv_dtypes = (*FLOAT_DTYPES, *FP8_DTYPES) if on_gpu else FLOAT_DTYPES
    for name, t, tail, least, what, dtypes in (
        ("q", q, (num_qo_heads, head_dim_qk), num_queries, "query tokens", FLOAT_DTYPES),
        (kv_name, k, (*slots, num_kv_heads, head_dim_qk), kv_extent, unit, kv_dtypes),
        (kv_name, v, (*slots, num_kv_heads, head_dim_vo), kv_extent, unit, kv_dtypes),
        ("out", out, (num_qo_heads, head_dim_vo), num_queries, "query tokens", FLOAT_DTYPES),
    ):
        check_tensor(name, t, dtypes=dtypes, shape=(None, *tail), last_dim_contiguous=True, writable=name == "out")
        check_device(name, t, device)
        if t.shape[0] < least:
            raise ValueError(f"{name}: expected at least {least} {what}, as planned, got {t.shape[0]}")
    if k.dtype != v.dtype:
        raise ValueError(f"{kv_name}: expected K and V of one dtype, got {k.dtype} and {v.dtype}")
    if on_gpu and q.dtype not in Q_DTYPES:
        raise NotImplementedError(f"q: expected float16 or bfloat16 on a GPU, got {q.dtype}")
    if on_gpu and k.dtype not in (q.dtype, *FP8_DTYPES):
        raise NotImplementedError(
            f"{kv_name}: expected {q.dtype}, as q, float8_e4m3fn or float8_e5m2 on a GPU, got {k.dtype}"
        )
    native = _native.TensorLayout(
        DTYPE_CODES[q.dtype],
        DTYPE_CODES[k.dtype],
        DTYPE_CODES[out.dtype],
        q.shape[0],
        min(k.shape[0], v.shape[0]),
        q.stride()[:2],
        _kv_strides(k, on_gpu),
        _kv_strides(v, on_gpu),
        out.stride()[:2],
    )
    aligned = all(_has_aligned_rows(t) for t in (q, k, v, out))
    dtypes = (q.dtype, k.dtype, out.dtype)
    mapped = _fits_tensor_map(k) and _fits_tensor_map(v)
    return Layout(signature, native, dtypes, aligned, mapped, k.shape[0], v.data_ptr() - k.data_ptr())


def check_device(name: str, t: torch.Tensor, device: torch.device) -> None:
    """Raise `ValueError` unless a tensor is where the plan is."""
    if t.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, as planned, got one on {t.device}")


def _kv_strides(t: torch.Tensor, on_gpu: bool) -> tuple[int, ...]:
    """Return the strides of page, token and head; on a GPU a token without pages counts as a page."""
    *pages, token, head, _ = t.stride()
    return (*pages, token, head) if pages else (token, 0, head) if on_gpu else (0, token, head)


def _has_aligned_rows(t: torch.Tensor) -> bool:
    size = t.element_size()
    return t.shape[-1] * size % 16 == 0 and all(stride * size % 16 == 0 for stride in _strides(t))


def _fits_tensor_map(t: torch.Tensor) -> bool:
    size = t.element_size()
    return t.shape[0] > 0 and all(0 < stride * size < MAX_STRIDE for stride in _strides(t))


def _strides(t: torch.Tensor) -> list[int]:
    """Return the strides of the dimensions before the last that have more than one index."""
    return [stride for n, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1]
