"""Attention inside of `torch.compile`: one graph, the numbers of eager mode, and plans that change between its runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import flashinfer_core
from flashinfer_core import activation, norm, page, reference, rope
from flashinfer_core.attention import AttentionPlan
from flashinfer_core.testing import AttentionCase, workspace

HEADS, KV_HEADS, DIM, PAGE, HIDDEN = 4, 2, 64, 16, 96


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()
    counters.clear()


def compiled(function: Callable[..., Any], backend: str = "aot_eager") -> Callable[..., Any]:
    return torch.compile(function, backend=backend, fullgraph=True)


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def assert_same(actual: Any, expected: Any) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


class Layer(torch.nn.Module):
    """A decoder layer of our functions, over a cache that it appends to."""

    def __init__(self, wrapper: Any, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.wrapper = wrapper
        sizes = {"qkv": ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), "o": (HIDDEN, HEADS * DIM)}
        sizes |= {"gate_up": (2 * HIDDEN, HIDDEN), "down": (HIDDEN, HIDDEN)}
        for name, size in sizes.items():
            self.register_buffer(name, (torch.randn(size) * HIDDEN**-0.5).to(device, dtype))
        self.register_buffer("weight", torch.ones(HIDDEN, device=device, dtype=dtype))
        self.register_buffer("table", reference.cos_sin_cache(4096, reference.rope_frequencies(DIM)).to(device))

    def forward(
        self, x: torch.Tensor, cache: torch.Tensor, positions: torch.Tensor, pages: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        qkv = norm.rmsnorm(x, self.weight) @ self.qkv.T
        q, k, v = qkv.split((HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM), dim=1)
        q, k = rope.apply_rope_with_cos_sin_cache(positions, q, k, DIM, self.table)
        k, v = k.view(-1, KV_HEADS, DIM), v.view(-1, KV_HEADS, DIM)
        batch, indptr, indices, last_page_len = pages
        page.append_paged_kv_cache(k, v, batch, positions, cache, indices, indptr, last_page_len)
        out, lse = self.wrapper.run(q.view(-1, HEADS, DIM), cache, return_lse=True)
        x = x + out.view(len(x), -1) @ self.o.T
        hidden = activation.silu_and_mul(norm.rmsnorm(x, self.weight) @ self.gate_up.T)
        return x + hidden @ self.down.T, lse


def step(lens: tuple[tuple[int, int], ...], device: str) -> tuple[torch.Tensor, ...]:
    """Return query offsets, the request of each token, its position, and a CSR page table."""
    case = AttentionCase(lens)
    batch = torch.tensor([r for r, (qo, _) in enumerate(lens) for _ in range(qo)], dtype=torch.int32)
    positions = torch.tensor([kv - qo + i for qo, kv in lens for i in range(qo)], dtype=torch.int32)
    return tuple(t.to(device) for t in (case.qo_indptr, batch, positions, *case.paged))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_decoder_layer(backend: str, device: str) -> None:
    """flashinfer-ai/flashinfer#482 and #2733."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    wrapper = flashinfer_core.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    layer = Layer(wrapper, device, dtype)
    run = compiled(layer, backend)
    cache = torch.randn(40, 2, PAGE, KV_HEADS, DIM).to(device, dtype)
    found = []
    for lens in [((3, 30), (2, 7)), ((1, 90), (1, 17), (9, 9)), ((2, 5), (9, 300))]:
        qo_indptr, batch, positions, *pages = step(lens, device)
        wrapper.plan(qo_indptr, *pages, HEADS, KV_HEADS, DIM, PAGE, causal=True, q_data_type=dtype)
        x = torch.randn(len(positions), HIDDEN).to(device, dtype)
        expected_cache, actual_cache = cache.clone(), cache.clone()
        expected = layer(x, expected_cache, positions, (batch, *pages))
        actual = run(x, actual_cache, positions, (batch, *pages))
        # The compiler fuses additions around the kernels.
        tolerance = 0.0 if backend == "aot_eager" else {torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
        for a, b in zip((*actual, actual_cache), (*expected, expected_cache), strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        found.append(graphs())
    assert found[0] == 1
    assert found[1] == found[2] <= 2, "a new plan compiled the layer again"


def test_a_new_plan_of_equal_shapes_compiles_nothing(device: str) -> None:
    case = AttentionCase(((1, 30), (1, 7)), causal=False).on(device)
    wrapper = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    run = compiled(lambda q, cache: wrapper.run(q * 2, cache) + 1)
    for lens in (((1, 30), (1, 7)), ((1, 1), (1, 100)), ((1, 0), (1, 5))):
        case = AttentionCase(lens, causal=False).on(device)
        case.plan_decode(wrapper)
        pages = [torch.nn.functional.pad(t, (0,) * 7 + (20 - len(t),)) for t in case.cache]
        assert_same([run(case.q, tuple(pages))], [wrapper.run(case.q * 2, tuple(pages)) + 1])
    assert graphs() == 1


def test_several_wrappers_share_graphs(device: str) -> None:
    """As the layers of a model do whose windows differ: the number of a wrapper is no constant of the graph."""
    case = AttentionCase(((2, 30), (2, 7))).on(device)
    run = compiled(lambda wrapper, q, cache: wrapper.run(q, cache))
    for window in (-1, 3, 9, 17, 21):
        wrapper = flashinfer_core.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
        wrapper.plan(case.qo_indptr, *case.paged, 4, 2, 64, 16, causal=True, window_left=window, q_data_type=case.dtype)
        assert_same([run(wrapper, case.q, case.cache)], [wrapper.run(case.q, case.cache)])
    assert graphs() <= 2


def test_options_of_a_run(device: str) -> None:
    case = AttentionCase(((3, 30), (2, 7)), sinks=True).on(device)
    wrapper = flashinfer_core.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    case.plan_paged(wrapper)
    out = torch.empty_like(case.q)

    def runs(q: torch.Tensor, cache: Any, sinks: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, ln = wrapper.run(
            q, cache, sinks=sinks, k_scale=scale, v_scale=0.5, return_lse=True, lse_base="ln", lse_layout="HN"
        )
        wrapper.run(q, cache, window_left=4, out=out)
        return a, ln, out * 2, wrapper.forward(q, cache, causal=True, logits_soft_cap=3.0, sm_scale=0.2)

    arguments = (case.q, case.cache, case.sink_logits, torch.tensor([0.7], device=device))
    expected = [t.clone() for t in runs(*arguments)]
    assert_same(compiled(runs)(*arguments), expected)
    assert_same([out * 2], expected[2:3])


def test_ragged(device: str) -> None:
    case = AttentionCase(((3, 30), (2, 7)), head_dim_vo=32).on(device)
    wrapper = flashinfer_core.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    case.plan_ragged(wrapper)
    run = compiled(lambda q, k, v: wrapper.run(q, k, v, o_scale=2.0))
    assert_same([run(case.q, *case.ragged)], [wrapper.run(case.q, *case.ragged, o_scale=2.0)])


def test_plan(device: str) -> None:
    def make(lens: tuple[tuple[int, int], ...]) -> tuple[AttentionCase, AttentionPlan]:
        case = AttentionCase(lens).on(device)
        indptr, indices, last = case.paged
        heads = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64, "page_size": 16}
        pages = {"kv_indptr": indptr, "kv_indices": indices, "kv_last_page_len": last}
        return case, AttentionPlan(case.qo_indptr, **heads, **pages, device=torch.device(device))

    def run(plan: AttentionPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=q.device)
        plan.run(q, k, v, out, lse, sm_scale=0.125, logits_soft_cap=4.0)
        return out, lse

    traced = compiled(run)
    for lens in (((3, 30), (2, 7)), ((2, 9), (4, 40), (1, 1)), ((5, 50), (1, 7), (2, 2))):
        case, plan = make(lens)
        assert_same(traced(plan, case.q, *case.cache), run(plan, case.q, *case.cache))
    assert graphs() <= 2


def test_single_requests(device: str) -> None:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        prefill, decode = flashinfer_core.single_prefill_with_kv_cache, flashinfer_core.single_decode_with_kv_cache
        out, lse = prefill(q, k, v, causal=True, v_scale=2.0, logits_soft_cap=3.0, return_lse=True)
        masked = prefill(q, k, v, custom_mask=mask)
        return out, lse, masked, decode(q[0], k, v, pos_encoding_mode="ROPE_LLAMA", window_left=5)

    traced = compiled(run)
    for qo, kv in ((3, 30), (5, 9), (17, 400)):
        case = AttentionCase(((qo, kv),), custom_mask=True).on(device)
        arguments = (case.q, *case.ragged, case.flat_masks)
        assert_same(traced(*arguments), run(*arguments))
    assert graphs() <= 2


def test_cascade(device: str) -> None:
    case = AttentionCase(((4, 40), (4, 21)), causal=False).on(device)
    wrapper = flashinfer_core.MultiLevelCascadeAttentionWrapper(2, workspace(device))
    shared = tuple(torch.tensor(x, dtype=torch.int32) for x in ([0, 8], [0, 2], [0, 1], [16]))
    tables = zip(shared, (case.qo_indptr, *case.paged), strict=True)
    wrapper.plan(*(list(arrays) for arrays in tables), 4, 2, 64, 16, causal=True, q_data_type=case.dtype)
    cache = tuple(t.nan_to_num() for t in case.cache)
    assert_same([compiled(lambda q: wrapper.run(q, cache))(case.q)], [wrapper.run(case.q, cache)])


def test_refusals_inside_a_graph(device: str) -> None:
    case = AttentionCase(((3, 30), (2, 7))).on(device)
    wrapper = flashinfer_core.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    run = compiled(lambda q, cache: wrapper.run(q, cache))
    with pytest.raises(RuntimeError, match="call plan"):
        run(case.q, case.cache)
    case.plan_paged(wrapper)
    run(case.q, case.cache)
    with pytest.raises(ValueError, match=r"^q: expected 5 tokens"):
        run(case.q[:4], case.cache)
