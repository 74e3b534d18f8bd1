"""Calls of all small operations on fresh random tensors, for the tests of how they are called: compiled, captured, on
streams. Each function returns its results and also writes to some of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from flashinfer_core import activation, cascade, norm, page, quantization, reference, rope

Outputs = tuple[torch.Tensor, ...]


def norms(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Outputs:
    y = norm.rmsnorm(x * 2, weight)
    norm.rmsnorm(y, weight, out=y)
    norm.fused_add_rmsnorm(x, residual, weight)
    norm.gemma_fused_add_rmsnorm(y, residual[:, :], weight)
    return norm.layernorm(y + x, weight, weight), norm.gemma_rmsnorm(residual, weight) - y


def activations(x: torch.Tensor) -> Outputs:
    gelu = activation.gelu_and_mul(x)
    out = torch.empty_like(gelu)
    activation.gelu_tanh_and_mul(x, out)
    return activation.silu_and_mul(torch.cat([gelu, out], dim=-1)), out


def ropes(qkv: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> Outputs:
    q, k = qkv[:, :64], qkv[:, 64:96]
    rope.apply_rope_with_cos_sin_cache_inplace(positions, q, k, 16, table)
    q, k = q.view(-1, 4, 16), k.view(-1, 2, 16)
    a, b = rope.apply_rope_pos_ids(q * 2, k, positions, rotary_dim=8)
    c, d = rope.apply_llama31_rope(a, b, torch.stack([positions[0] * 0, positions[0] * 0 + len(q)]), positions[:1])
    rope.apply_rope_pos_ids_inplace(c, d, positions, interleave=True)
    return a + 1, b, c, d


def pages(key: torch.Tensor, cache: torch.Tensor, seq_lens: torch.Tensor) -> Outputs:
    requests = torch.arange(len(seq_lens), device=key.device)
    indptr = torch.arange(len(seq_lens) + 1, device=key.device)
    batch_indices, positions = page.get_batch_indices_positions(indptr, seq_lens, len(key))
    last = seq_lens - 4 * ((seq_lens - 1) // 4)
    page.append_paged_kv_cache(key, key * 2, batch_indices, positions, cache, indptr, indptr, last)
    page.write_kv_slots(key + 1, key, cache[:, 0], cache[:, 1], seq_lens * 0 + requests + 13)
    return page.get_seq_lens(indptr, last, 4), cache.sum(dim=(2, 3))


def merges(v: torch.Tensor, s: torch.Tensor, mask: torch.Tensor) -> Outputs:
    a, s_a = cascade.merge_states(v, s)
    b, s_b = cascade.merge_state(a, s_a, v[:, 0], s[:, 0])
    cascade.merge_state_in_place(b, s_b, v[:, 1] * 2, s[:, 1], mask)
    return b, s_b, quantization.packbits(mask)


CALLS: dict[Callable[..., Outputs], Callable[[str], Outputs]] = {
    norms: lambda device: (
        torch.randn(3, 40, device=device),
        torch.randn(3, 40, device=device),
        torch.randn(40, device=device),
    ),
    activations: lambda device: (torch.randn(2, 3, 40, device=device),),
    ropes: lambda device: (
        torch.randn(5, 128, device=device),
        torch.randint(90, (5,), device=device),
        reference.cos_sin_cache(90, reference.rope_frequencies(16)).to(device),
    ),
    pages: lambda device: (
        torch.randn(3, 2, 8, device=device),
        torch.randn(6, 2, 4, 2, 8, device=device),
        torch.tensor([1, 4, 2], device=device),
    ),
    merges: lambda device: (
        torch.randn(5, 3, 2, 16, device=device),
        torch.randn(5, 3, 2, device=device),
        torch.rand(5, device=device) < 0.5,
    ),
}
