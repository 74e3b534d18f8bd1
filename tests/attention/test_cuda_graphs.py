"""Attention captured in CUDA graphs, which replay with lengths and page tables that change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_cases import HEADS, bf16, on_a_gpu  # noqa: F401

import flashinfer_core
from flashinfer_core.testing import AttentionCase, workspace


class Buffers:
    """Tensors that a captured graph reads: those of a case, with room for others, and the buffers of its wrapper."""

    def __init__(self, case: AttentionCase, most_pages: int = 600) -> None:
        self.q = torch.zeros_like(case.q)
        self.k, self.v = (t.new_zeros(most_pages, *t.shape[1:]) for t in case.cache)
        sizes = (len(case.lens) + 1, most_pages, len(case.lens))
        self.indptr, self.indices, self.last = (self.q.new_zeros(size, dtype=torch.int32) for size in sizes)
        self.held = [t.clone() for t in (self.indptr, self.indices, self.last)]
        self.load(case)

    def load(self, case: AttentionCase) -> None:
        """Fill the tensors with a case of as many requests and query rows."""
        self.q.copy_(case.q)
        mine, new = (self.k, self.v, self.indptr, self.indices, self.last), (*case.cache, *case.paged)
        for to, values in zip(mine, new, strict=True):
            to[: len(values)] = values.to(case.device)


def graph_cases(device: str, qo: int = 1) -> list[AttentionCase]:
    lens = [(4000, 17, 0, 256), (1, 1000, 2000, 3), (900, 900, 900, 1500)]
    return [bf16(tuple((qo, kv) for kv in kvs), device, causal=qo > 1, seed=i) for i, kvs in enumerate(lens)]


def prefill_wrapper(b: Buffers, **options: Any) -> flashinfer_core.BatchPrefillWithPagedKVCacheWrapper:
    """A wrapper for graphs of two requests."""
    device = b.q.device
    return flashinfer_core.BatchPrefillWithPagedKVCacheWrapper(
        workspace(str(device)),
        use_cuda_graph=True,
        qo_indptr_buf=torch.empty(3, dtype=torch.int32, device=device),
        paged_kv_indptr_buf=b.held[0],
        paged_kv_indices_buf=b.held[1],
        paged_kv_last_page_len_buf=b.held[2],
        **options,
    )


def capture(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    function()  # allocates and compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


def check_replays(
    b: Buffers, wrapper: Any, cases: list[AttentionCase], plan: Callable[[AttentionCase], object]
) -> None:
    """Capture a run of the first case, then replay it after the plan of each case and compare with the reference."""
    plan(cases[0])
    graph, result = capture(lambda: wrapper.run(b.q, (b.k, b.v), return_lse=True))
    for case in (*cases[1:], cases[0]):
        b.load(case)
        plan(case)
        graph.replay()
        case.compare(result)


@pytest.mark.parametrize("qo", [1, 9])
def test_captured_plan_and_run_replay_with_new_lengths(qo: int, device: str) -> None:
    cases = graph_cases(device, qo)
    b = Buffers(cases[0])
    wrapper = flashinfer_core.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *b.held)

    def step() -> Any:
        wrapper.plan(b.indptr, b.indices, b.last, *HEADS, 16, q_data_type=torch.bfloat16, q_len_per_req=qo)
        return wrapper.run(b.q, (b.k, b.v), return_lse=True)

    graph, result = capture(step)
    for case in (*cases, cases[0]):
        b.load(case)
        graph.replay()
        case.compare(result)


@pytest.mark.parametrize("arrays", ["host", "device"])
def test_captured_run_replays_what_a_later_plan_wrote(arrays: str, device: str) -> None:
    """alibaba/rtp-llm#1254."""
    cases = [dataclasses.replace(case, arrays=arrays) for case in graph_cases(device)]
    b = Buffers(cases[0])
    wrapper = flashinfer_core.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *b.held)
    check_replays(b, wrapper, cases, lambda case: case.plan_decode(wrapper))


def test_captured_prefill_replays_what_a_later_plan_wrote(device: str) -> None:
    lens = [((20, 900), (7, 7)), ((1, 700), (26, 300)), ((27, 27), (0, 1000))]
    cases = [bf16(pairs, device, seed=i, custom_mask=True) for i, pairs in enumerate(lens)]
    b = Buffers(cases[0])
    wrapper = prefill_wrapper(
        b,
        custom_mask_buf=torch.empty(10000, dtype=torch.uint8, device=device),
        mask_indptr_buf=torch.empty(3, dtype=torch.int32, device=device),
    )
    check_replays(b, wrapper, cases, lambda case: case.plan_paged(wrapper))


def test_captured_prefill_replays_plans_that_cut_nothing(device: str) -> None:
    """flashinfer-ai/flashinfer#4002 and #411: captured with even lengths and split keys, replayed without either."""
    lens = [((16, 4000), (16, 3000)), ((1, 20), (31, 64)), ((30, 900), (2, 2))]
    cases = [bf16(pairs, device, seed=i, plan_options={"disable_split_kv": i > 0}) for i, pairs in enumerate(lens)]
    b = Buffers(cases[0])
    wrapper = prefill_wrapper(b)
    check_replays(b, wrapper, cases, lambda case: case.plan_paged(wrapper))


@pytest.mark.parametrize("qo", [1, 40])
def test_captured_run_of_few_pieces_replays_many(qo: int, device: str) -> None:
    """Partial results lie where the first plan put them, whatever the plan that a run was captured with."""
    lens = [((qo, 4000), (qo, 3000)), ((qo, 300), (qo, 70))]
    many, few = (bf16(pairs, device, seed=i, plan_options={"fixed_split_size": 8}) for i, pairs in enumerate(lens))
    b = Buffers(many)
    wrapper = prefill_wrapper(b)
    many.plan_paged(wrapper)
    b.load(few)
    check_replays(b, wrapper, [few, many], lambda case: case.plan_paged(wrapper))
    later = prefill_wrapper(b)
    few.plan_paged(later)
    with pytest.raises(ValueError, match=r"^plan: expected a batch that is cut into no more pieces"):
        many.plan_paged(later)


def test_capture_refuses_what_it_would_replay_wrongly(device: str) -> None:
    case = graph_cases(device)[0]
    b = Buffers(case)
    make = flashinfer_core.CUDAGraphBatchDecodeWithPagedKVCacheWrapper
    planned = make(workspace(device), *b.held)
    case.plan_decode(planned)
    fresh = make(workspace(device), *(t.clone() for t in b.held))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match=r"^indices, indptr, last_page_len: expected tensors on cuda"):
            case.plan_decode(planned)
        with pytest.raises(RuntimeError, match=r"^plan: expected a first plan before the capture"):
            fresh.plan(b.indptr, b.indices, b.last, *HEADS, 16, q_data_type=torch.bfloat16)
        b.q.add_(0)  # a graph must not be empty
    table = torch.zeros(4, 300, dtype=torch.int32, device=device)
    dense = make(workspace(device), *b.held)
    lens = torch.ones(4, dtype=torch.int32, device=device)
    options = {"q_data_type": torch.bfloat16, "seq_lens": lens}
    dense.plan(None, None, None, *HEADS, 16, block_tables=table, **options)
    with pytest.raises(ValueError, match=r"^block_tables: expected the tensor of the first plan"):
        dense.plan(None, None, None, *HEADS, 16, block_tables=table.clone(), **options)


def test_single_request_in_a_graph(device: str) -> None:
    case = bf16(((33, 700),), device)
    graph, result = capture(
        lambda: flashinfer_core.single_prefill_with_kv_cache(case.q, *case.ragged, causal=True, return_lse=True)
    )
    for n in (1, 2, 3, 40):  # plans of other shapes come and go
        flashinfer_core.single_decode_with_kv_cache(case.q[0], *(t[: 7 * n] for t in case.ragged))
    for t in result:
        t.fill_(torch.nan)
    graph.replay()
    case.compare(result)
