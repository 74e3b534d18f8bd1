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
    for i, (request, position) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
        if request >= 0:
            page = kv_indices[kv_indptr[request] + position // page_size]
            k_cache[page, position % page_size] = append_key[i].to(k_cache.dtype)
            v_cache[page, position % page_size] = append_value[i].to(v_cache.dtype)


def write_kv_slots(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write keys and values into slots of caches ``[pages, page_size, heads, dim]``."""
    for i, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, k_cache.shape[1])
            k_cache[page, offset] = key[i].to(k_cache.dtype)
            v_cache[page, offset] = value[i].to(v_cache.dtype)


def get_batch_indices_positions(
    append_indptr: torch.Tensor, seq_lens: torch.Tensor, nnz: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the request and the position of each appended token, both int32."""
    appended = append_indptr.diff()
    requests = torch.repeat_interleave(torch.arange(len(appended)), appended)
    positions = torch.arange(len(requests)) - append_indptr[1:].long()[requests] + seq_lens.long()[requests]
    padding = nnz - len(requests)
    return (
        torch.nn.functional.pad(requests, (0, padding), value=-1).int(),
        torch.nn.functional.pad(positions, (0, padding)).int(),
    )


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the number of tokens of each request, int32."""
    pages = kv_indptr.diff()
    return torch.where(pages > 0, (pages - 1) * page_size + kv_last_page_len, 0).int()
