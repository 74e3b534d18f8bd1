"""Paged KV cache, one token at a time."""

from __future__ import annotations

import torch


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
) -> None:
    """Write keys and values into caches ``[pages, page_size, heads, dim]``."""
    page_size = k_cache.shape[1]
    append_key, append_value = stored(append_key, k_cache.dtype), stored(append_value, v_cache.dtype)
    for i, (request, position) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
        if request >= 0:
            page = kv_indices[kv_indptr[request] + position // page_size]
            k_cache[page, position % page_size] = append_key[i]
            v_cache[page, position % page_size] = append_value[i]


def write_kv_slots(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write keys and values into slots of caches ``[pages, page_size, heads, dim]``."""
    key, value = stored(key, k_cache.dtype, k_scale), stored(value, v_cache.dtype, v_scale)
    for i, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, k_cache.shape[1])
            k_cache[page, offset] = key[i]
            v_cache[page, offset] = value[i]


def stored(x: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Return x as a cache of the dtype holds it: FP8 takes ``x / scale``, and its largest number for what is larger."""
    if x.dtype == dtype or dtype.itemsize > 1:
        return x.to(dtype)
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-largest, largest).to(dtype)


def get_batch_indices_positions(
    append_indptr: torch.Tensor, seq_lens: torch.Tensor, nnz: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the request and the position of each appended token, both int32."""
    appended = append_indptr.diff()
    requests = torch.repeat_interleave(torch.arange(len(appended), device=appended.device), appended)
    positions = (
        torch.arange(len(requests), device=appended.device)
        - append_indptr[1:].long()[requests]
        + seq_lens.long()[requests]
    )
    padding = nnz - len(requests)
    return (
        torch.nn.functional.pad(requests, (0, padding), value=-1).int(),
        torch.nn.functional.pad(positions, (0, padding)).int(),
    )


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the number of tokens of each request, int32."""
    pages = kv_indptr.diff()
    return torch.where(pages > 0, (pages - 1) * page_size + kv_last_page_len, 0).int()
