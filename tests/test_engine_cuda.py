"""The core of the adapters on a GPU: captured CUDA graphs, FP8 caches, and results that do not depend on the batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from engine_cases import DECODE, KINDS, MIXED, Arrays, assert_right, attend, case_of, group_of, layer_of

from flashinfer_core import engine
from flashinfer_core.testing import AttentionCase, no_waiting


@pytest.fixture
def gpu(device: str) -> str:
    if not device.startswith("cuda"):
        pytest.skip("for a GPU")
    return device


class Served:
    """A layer with the tensors that an engine keeps in place, and a captured graph of its run."""

    def __init__(self, case: AttentionCase, requests: int, q_len: float, tokens: int, **options: Any) -> None:
        self.q_len, self.case = q_len, case
        self.arrays = Arrays(case.device, requests, 128)
        self.q = torch.zeros(tokens, *case.q.shape[1:], dtype=case.dtype, device=case.device)
        self.out = torch.zeros(tokens, case.num_qo_heads, case.dim_vo, dtype=case.dtype, device=case.device)
        self.k, self.v = (t.new_zeros(1024, *t.shape[1:]) for t in case.cache)
        self.layer = layer_of(case)
        self.group = group_of(case, [self.layer], max_requests=64, **options)
        self.scales: dict[str, Any] = {}

    def load(self, case: AttentionCase) -> None:
        self.arrays.load(case)
        self.q[: len(case.q)] = case.q
        for mine, theirs in zip((self.k, self.v), case.cache, strict=True):
            mine[: len(theirs)] = theirs

    def plan(self) -> Any:
        return self.group.plan_paged(
            *self.arrays.as_tuple(), page_size=self.case.page_size, causal=True, q_len=self.q_len
        )

    def run(self, plan: Any) -> None:
        self.layer.run(plan, self.q, self.k, self.v, self.out, **self.scales)

    def capture(self, in_graph: bool = False) -> torch.cuda.CUDAGraph:
        self.run(self.plan())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        plan = self.plan()
        with torch.cuda.graph(graph):
            self.run(self.plan() if in_graph else plan)
        return graph


BATCHES = {  # each fits into the numbers of requests and tokens of the first
    "decode": (1.0, [DECODE, ((1, 3), (1, 2000), (1, 900)), ((1, 1),), ((1, 60), (1, 60), (1, 61), (1, 64))]),
    "speculation": (4.0, [tuple((4, kv + 4) for _, kv in DECODE), ((4, 4), (4, 1900)), ((2, 700), (4, 50), (1, 9))]),
    "mixed": (16.0, [((30, 30), (1, 800), (32, 1700), (1, 9)), ((60, 1500), (1, 2), (1, 3)), ((64, 64),), DECODE]),
}


@pytest.mark.parametrize("kind", ["plain", "window", "soft_cap", "sinks", "alibi", "head_dim_256", "one_kv_head"])
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("in_graph", [False, True])
def test_captured_graph_replays_other_batches(name: str, kind: str, in_graph: bool, gpu: str) -> None:
    q_len, batches = BATCHES[name]
    cases = [case_of(lens, gpu, seed=i, **KINDS[kind]) for i, lens in enumerate(batches)]
    served = Served(cases[0], 4, q_len, len(cases[0].q))
    served.load(cases[0])
    graph = served.capture(in_graph)
    for case in (*cases[1:], cases[0]):
        served.load(case)
        if case.sink_logits is not None:
            served.layer.sinks.copy_(case.sink_logits)
        with no_waiting():
            if not in_graph:
                served.plan()
            graph.replay()
        assert_right(case, served.out[: len(case.q)])


def test_graphs_of_several_sizes_share_a_group(gpu: str) -> None:
    """Eager batches of other sizes in between, larger ones too, leave the graphs' memory where it is."""
    small, large = case_of(DECODE[:2], gpu), case_of(MIXED, gpu, seed=1)
    few, many = Served(small, 2, 1.0, 2), Served(large, 4, 1.0, len(large.q))
    many.group, many.layer = few.group, few.layer
    graphs = []
    for served, case in ((few, small), (many, large)):
        served.load(case)
        graphs.append(served.capture())
    wide = case_of(((1, 30),) * 64, gpu)
    assert_right(wide, attend(wide, few.group, few.layer, q_len=1.0))
    assert_right(large, attend(large, few.group, few.layer, q_len=None))
    for served, case, graph in ((few, small, graphs[0]), (many, large, graphs[1])) * 2:
        served.out.zero_()
        served.plan()
        graph.replay()
        assert_right(case, served.out)
    too_many = case_of(((1, 1),) * 65, gpu)
    with pytest.raises(ValueError, match="qo_indptr: expected at most max_requests = 64 requests, got 65"):
        attend(too_many, few.group, few.layer)


def test_arrays_in_host_memory_are_refused_on_a_gpu(gpu: str) -> None:
    case = case_of(DECODE, gpu)
    layer, arrays = layer_of(case), Arrays.of(case)
    with pytest.raises(ValueError, match="qo_indptr: expected a tensor on cuda:0, where the cache is, got one on cpu"):
        group_of(case, [layer]).plan_paged(
            arrays.qo_indptr.cpu(), arrays.kv_lens, arrays.table, page_size=16, causal=True
        )


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_batch_invariance_of_chunks(dim: int, soft_cap: float, gpu: str) -> None:
    """Query rows in one batch, and spread over several: the same bits."""
    rows, keys = 300, 901
    case = case_of(((rows, keys),), gpu, dim=dim, logits_soft_cap=soft_cap)
    layer, arrays = layer_of(case), Arrays.of(case)
    group = group_of(case, [layer], batch_invariant=True, max_requests=1)
    whole = attend(case, group, layer, arrays)
    assert_right(case, whole)
    for begin, end in ((0, 77), (77, 78), (78, 299), (299, 300)):
        indptr, lens = (torch.tensor(t, dtype=torch.int32, device=gpu) for t in ([0, end - begin], [keys - rows + end]))
        plan = group.plan_paged(indptr, lens, arrays.table, page_size=case.page_size, causal=True)
        part = torch.empty_like(case.q[begin:end])
        layer.run(plan, case.q[begin:end], *case.cache, part)
        assert torch.equal(part, whole[begin:end])


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("numbers", [True, False])
def test_fp8_cache_with_scales(name: str, numbers: bool, gpu: str) -> None:
    """Written and read with the layer's scales; in a graph with what their tensors hold at the replay."""
    case = dataclasses.replace(case_of(DECODE, gpu, dim=128), dtype=torch.bfloat16)
    fp8 = engine.cache_dtype(name)
    assert fp8 is not None
    layer = layer_of(case)
    group = group_of(case, [layer], max_requests=4)
    group.kv_dtype = torch.uint8  # as engines allocate it
    k, v = case.cache
    pages, size, heads, dim = k.shape
    memory = torch.zeros(pages, size, heads, 2 * dim, dtype=torch.uint8, device=gpu)
    stored = memory.view(fp8).tensor_split(2, dim=-1)
    scales = {"k_scale": torch.tensor(0.05, device=gpu), "v_scale": torch.tensor(0.25, device=gpu)}
    given = {scale: float(t) for scale, t in scales.items()} if numbers else scales
    keys, values = (t.nan_to_num().to(torch.bfloat16).flatten(0, 1) for t in (k, v))
    layer.write(keys, values, *stored, torch.arange(pages * size, device=gpu), **given)

    arrays = Arrays.of(case)
    case.__dict__["cache"] = stored
    read = [stored[0].float() * scales["k_scale"], stored[1].float() * scales["v_scale"]]
    expected = dataclasses.replace(case, kv_dtype=torch.float32)
    expected.__dict__["kv"] = [
        tuple(t[arrays.table[r].long()].flatten(0, 1)[:kv].cpu() for t in read) for r, (_, kv) in enumerate(case.lens)
    ]
    for mine, original in zip(expected.kv[0], case.kv[0], strict=True):  # the scale was undone
        torch.testing.assert_close(mine, original.float(), rtol=0.15, atol=0.1)
    assert_right(case, attend(case, group, layer, arrays, q_len=1.0, **given), expected.expected()[0])
    if numbers:
        return
    plan = group.plan_paged(*arrays.as_tuple(), page_size=case.page_size, causal=True, q_len=1.0)
    out, graph = torch.empty_like(case.q), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.run(plan, case.q, *stored, out, **scales)
    scales["v_scale"].mul_(0.5)
    graph.replay()
    assert_right(case, out, expected.expected()[0] / 2)
