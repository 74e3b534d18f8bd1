"""The small operations inside `torch.compile`: one graph, and the same numbers as without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flashinfer_core import activation, norm, page, reference, rope

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
    indptr = torch.arange(len(seq_lens) + 1)
    batch_indices, positions = page.get_batch_indices_positions(indptr, seq_lens, len(key))
    last = seq_lens - 4 * ((seq_lens - 1) // 4)
    page.append_paged_kv_cache(key, key * 2, batch_indices, positions, cache, indptr, indptr, last)
    page.write_kv_slots(key + 1, key, cache[:, 0], cache[:, 1], seq_lens * 0 + torch.arange(len(seq_lens)) + 13)
    return page.get_seq_lens(indptr, last, 4), cache.sum(dim=(2, 3))


CALLS: dict[Callable[..., Outputs], Callable[[], Outputs]] = {
    norms: lambda: (torch.randn(3, 40), torch.randn(3, 40), torch.randn(40)),
    activations: lambda: (torch.randn(2, 3, 40),),
    ropes: lambda: (
        torch.randn(5, 128),
        torch.randint(90, (5,)),
        reference.cos_sin_cache(90, reference.rope_frequencies(16)),
    ),
    pages: lambda: (torch.randn(3, 2, 8), torch.randn(6, 2, 4, 2, 8), torch.tensor([1, 4, 2])),
}


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_compiled_equals_eager(function: Callable[..., Outputs], device: str) -> None:
    """flashinfer-ai/flashinfer#2733 and #482."""
    if device != "cpu":
        pytest.skip("an operator for each device")
    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for _ in range(2):  # the second call runs the graph with other tensors
        arguments = CALLS[function]()
        copies = tuple(t.clone() for t in arguments)
        expected = function(*arguments)
        actual = compiled(*copies)
        for got, want in zip((*actual, *copies), (*expected, *arguments), strict=True):
            assert torch.equal(got, want)


def test_refusals_inside_a_graph() -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda x, w: norm.rmsnorm(x, w), backend="aot_eager")
    with pytest.raises(ValueError, match=r"^weight: expected shape \[8\], got \[7\]"):
        compiled(torch.randn(2, 8), torch.randn(7))
