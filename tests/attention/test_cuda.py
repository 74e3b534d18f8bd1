"""Attention on a GPU beyond what every device has: no waiting, CUDA graphs, streams, FP8 caches, faults, memory."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import flashinfer_core
from flashinfer_core.attention import AttentionPlan
from flashinfer_core.testing import AttentionCase, embed, workspace

HEADS = (8, 2, 128)
Wrapper = Any


@pytest.fixture(autouse=True)
def _on_a_gpu(device: str) -> None:
    if not device.startswith("cuda"):
        pytest.skip("for a GPU")


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Turn every synchronisation with the GPU into an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def bf16(lens: tuple[tuple[int, int], ...], device: str, **options: Any) -> AttentionCase:
    return AttentionCase(lens, *HEADS, dtype=torch.bfloat16, device=device, **options)


DECODE = ((1, 3000), (1, 17), (1, 0), (1, 256))
PREFILL = ((5, 900), (300, 300), (1, 40))


def decode_wrapper(case: AttentionCase) -> Wrapper:
    return flashinfer_core.BatchDecodeWithPagedKVCacheWrapper(workspace(case.device), case.kv_layout)


def prefill_wrapper(case: AttentionCase) -> Wrapper:
    return flashinfer_core.BatchPrefillWithPagedKVCacheWrapper(workspace(case.device), case.kv_layout)


def made(*cases: AttentionCase) -> None:
    """Make all tensors of some cases, which is done when they are first used, and wait for them."""
    for case in cases:
        _ = (case.q, case.cache, case.ragged, case.placed, case.sink_logits, case.flat_masks)
    torch.cuda.synchronize()


@pytest.mark.parametrize("arrays", ["host", "device", "mixed"])
@pytest.mark.parametrize("mode", ["NONE", "ALIBI", "ROPE_LLAMA"])
def test_plan_and_run_wait_for_nothing(arrays: str, mode: str, device: str) -> None:
    decode = bf16(DECODE, device, causal=False, arrays=arrays, pos_encoding_mode=mode, sinks=True)
    prefill = bf16(PREFILL, device, arrays=arrays, pos_encoding_mode=mode)
    masked = dataclasses.replace(prefill, custom_mask=True)
    made(decode, prefill, masked)
    first, second, third = decode_wrapper(decode), prefill_wrapper(prefill), prefill_wrapper(masked)
    ragged = flashinfer_core.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    options = {"k_scale": torch.ones(1, device=device), "v_scale": torch.ones((), device=device), "return_lse": True}
    for _ in range(2):  # the first time compiles and allocates
        with no_waiting():
            decode.plan_decode(first)
            decoded = first.run(decode.q, decode.cache, sinks=decode.sink_logits, **options)
            prefill.plan_paged(second)
            paged = second.run(prefill.q, prefill.cache, **options)
            masked.plan_paged(third)
            unmasked = third.run(masked.q, masked.cache, **options)
            prefill.plan_ragged(ragged)
            joined = ragged.run(prefill.q, *prefill.ragged, **options)
            flashinfer_core.single_prefill_with_kv_cache(prefill.q, *prefill.ragged, causal=True, return_lse=True)
    decode.compare(decoded)
    prefill.compare(paged)
    masked.compare(unmasked)
    prefill.compare(joined)


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


def capture(function: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    function()  # allocates and compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


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
    cases = [dataclasses.replace(case, arrays=arrays) for case in graph_cases(device)]
    b = Buffers(cases[0])
    wrapper = flashinfer_core.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *b.held)
    cases[0].plan_decode(wrapper)
    graph, result = capture(lambda: wrapper.run(b.q, (b.k, b.v), return_lse=True))
    for case in (*cases[1:], cases[0]):
        b.load(case)
        case.plan_decode(wrapper)
        graph.replay()
        case.compare(result)


def test_captured_prefill_replays_what_a_later_plan_wrote(device: str) -> None:
    lens = [((20, 900), (7, 7)), ((1, 700), (26, 300)), ((27, 27), (0, 1000))]
    cases = [bf16(pairs, device, seed=i, custom_mask=True) for i, pairs in enumerate(lens)]
    b = Buffers(cases[0])
    wrapper = flashinfer_core.BatchPrefillWithPagedKVCacheWrapper(
        workspace(device),
        use_cuda_graph=True,
        qo_indptr_buf=torch.empty(3, dtype=torch.int32, device=device),
        paged_kv_indptr_buf=b.held[0],
        paged_kv_indices_buf=b.held[1],
        paged_kv_last_page_len_buf=b.held[2],
        custom_mask_buf=torch.empty(10000, dtype=torch.uint8, device=device),
        mask_indptr_buf=torch.empty(3, dtype=torch.int32, device=device),
    )
    cases[0].plan_paged(wrapper)
    graph, result = capture(lambda: wrapper.run(b.q, (b.k, b.v), return_lse=True))
    for case in (*cases[1:], cases[0]):
        b.load(case)
        case.plan_paged(wrapper)
        graph.replay()
        case.compare(result)


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


def test_streams(device: str) -> None:
    """A plan on one stream and its run on another, and many steps of both on a stream that is not the default one."""
    case, side = bf16(PREFILL, device, arrays="device"), torch.cuda.Stream()
    made(case)
    wrapper = prefill_wrapper(case)
    case.plan_paged(wrapper)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        first = wrapper.run(case.q, case.cache, return_lse=True)
        for _ in range(20):
            case.plan_paged(wrapper)
            last = wrapper.run(case.q, case.cache, return_lse=True)
    side.synchronize()
    case.compare(first)
    case.compare(last)


FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("kv_dtype", FP8)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128, 256, 48])
@pytest.mark.parametrize("form", ["decode", "paged", "ragged"])
def test_fp8_cache(kv_dtype: torch.dtype, dtype: torch.dtype, dim: int, form: str, device: str) -> None:
    lens = DECODE if form == "decode" else PREFILL
    case = AttentionCase(
        lens, 8, 2, dim, dtype=dtype, kv_dtype=kv_dtype, device=device, causal=form != "decode", window_left=600
    )
    case.check(form)


@pytest.mark.parametrize("kv_dtype", FP8)
def test_fp8_cache_through_registers(kv_dtype: torch.dtype, device: str) -> None:
    """Rows that do not begin at multiples of 16 bytes, and rotation, take another way through the kernel."""
    bf16(PREFILL, device, kv_dtype=kv_dtype, gap=3, kv_layout="HND").check("paged", "ragged")
    bf16(DECODE, device, kv_dtype=kv_dtype, gap=3, causal=False).check("decode")
    bf16(DECODE, device, kv_dtype=kv_dtype, pos_encoding_mode="ROPE_LLAMA", causal=False).check("decode")


@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (112, 112), (128, 128), (192, 128), (256, 256), (40, 72)])
@pytest.mark.parametrize("qo", [1, 8, 40])
@pytest.mark.parametrize("gap", [0, 1])
def test_head_dims(dims: tuple[int, int], qo: int, gap: int, device: str) -> None:
    """Every kind of tile at every head dim, with rows at multiples of 16 bytes and without."""
    lens = ((qo, 700), (qo, 33))
    AttentionCase(lens, 12, 3, *dims, dtype=torch.bfloat16, device=device, gap=gap).check("paged", "ragged")


@pytest.mark.parametrize("o_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_output_dtypes(o_dtype: torch.dtype, device: str) -> None:
    case = bf16(PREFILL, device, plan_options={"o_data_type": o_dtype})
    out, lse = case.run_paged()
    assert out.dtype == o_dtype
    case.compare((out, lse))


def test_rows_past_the_planned_ones_are_not_written(device: str) -> None:
    case = bf16(((3, 300), (2, 40)), device)
    plan = AttentionPlan(
        case.qo_indptr.to(device),
        num_qo_heads=HEADS[0],
        num_kv_heads=HEADS[1],
        head_dim_qk=HEADS[2],
        page_size=16,
        kv_indptr=case.paged.indptr,
        kv_indices=case.paged.indices.to(device),
        kv_last_page_len=case.paged.last_page_len.to(device),
    )
    assert plan.num_queries is None
    assert plan.kv_lens is None
    q = torch.nn.functional.pad(case.q, (0, 0, 0, 0, 0, 4))
    out = torch.full_like(q, torch.nan)
    lse = torch.full(q.shape[:2], torch.nan, device=device)
    plan.run(q, *case.cache, out, lse, sm_scale=HEADS[2] ** -0.5)
    case.compare((out[:5], lse[:5]))
    assert out[5:].isnan().all()
    assert lse[5:].isnan().all()


WRONG = {
    "qo_indptr": ("qo_indptr", [0, 7, 5]),
    "paged_kv_indptr": ("paged_kv_indptr", [0, 25, 3]),
    "paged_kv_last_page_len": ("paged_kv_last_page_len", [17, 8]),
    "paged_kv_indices": ("paged_kv_indices", [0, 1, 10**6, *range(3, 22)]),
    "paged_kv_indices, negative": ("paged_kv_indices", [0, 1, -1, *range(3, 22)]),
    "q": ("qo_indptr", [0, 3, 50]),
    "seq_lens": ("seq_lens", [300, 10**6]),
    "seq_lens, negative": ("seq_lens", [-1, 40]),
    "block_tables": ("block_tables", [list(range(19)), [10**6] * 19]),
}


@pytest.mark.parametrize("said", WRONG)
def test_wrong_arrays_on_the_gpu_are_reported_by_the_next_call(said: str, device: str) -> None:
    case = bf16(((3, 300), (2, 40)), device, arrays="device")
    wrapper = prefill_wrapper(case)
    qo_indptr, _, paged = case.placed
    name, values = WRONG[said]
    table = torch.tensor([list(range(19)), list(range(19))], device=device).int()
    dense = {"block_tables": table, "seq_lens": torch.tensor([300, 40], device=device).int()}
    arrays = dict(zip(("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"), paged, strict=True))
    arrays |= {"qo_indptr": qo_indptr} | (dense if name in dense else {})
    arrays[name] = torch.tensor(values, device=device).int()
    out = embed(torch.zeros(5, HEADS[0], HEADS[2], dtype=torch.bfloat16, device=device), gap=8, offset=8)

    def wrong() -> None:
        wrapper.plan(
            **arrays,
            num_qo_heads=HEADS[0],
            num_kv_heads=HEADS[1],
            head_dim_qk=HEADS[2],
            page_size=16,
            causal=True,
            q_data_type=torch.bfloat16,
        )
        wrapper.run(case.q, case.cache, out=out.view)
        torch.cuda.synchronize()
        wrapper.run(case.q, case.cache, out=out.view)

    with pytest.raises(RuntimeError, match=rf"^{said.partition(',')[0]}: expected .* found on cuda"):
        wrong()
    torch.cuda.synchronize()
    out.assert_intact()
    with contextlib.suppress(RuntimeError):  # what the second run reported
        case.plan_paged(wrapper)
    case.plan_paged(wrapper)
    case.compare(wrapper.run(case.q, case.cache, return_lse=True))


def test_refusals_of_a_gpu(device: str) -> None:
    case = bf16(PREFILL, device, arrays="device", plan_options={"fixed_split_size": 4})
    with pytest.raises(NotImplementedError, match=r"^fixed_split_size: expected qo_indptr and the lengths"):
        case.plan_paged(prefill_wrapper(case))
    with pytest.raises(NotImplementedError, match=r"^q_data_type: expected one of float16, bfloat16"):
        dataclasses.replace(case, dtype=torch.float32).plan_paged(prefill_wrapper(case))
    with pytest.raises(NotImplementedError, match=r"^kv_data_type: expected one of bfloat16, float8_e4m3fn"):
        dataclasses.replace(case, kv_dtype=torch.float16).plan_paged(prefill_wrapper(case))
    with pytest.raises(NotImplementedError, match=r"^q: expected float16 or bfloat16"):
        flashinfer_core.single_prefill_with_kv_cache(*(t.float() for t in (case.q, *case.ragged)))
    with pytest.raises(ValueError, match=r"^paged_kv_indptr: expected a tensor on cpu"):
        case.plan_paged(flashinfer_core.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu")))
    wrapper = prefill_wrapper(case)
    dataclasses.replace(case, plan_options={}).plan_paged(wrapper)
    for name, wrong in (
        ("q", {"q": case.q.cpu()}),
        ("paged_kv_cache", {"paged_kv_cache": tuple(t.cpu() for t in case.cache)}),
        ("sinks", {"sinks": torch.zeros(HEADS[0])}),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: expected a tensor on cuda"):
            wrapper.run(**{"q": case.q, "paged_kv_cache": case.cache, **wrong})


@pytest.mark.parametrize("form", ["dense", "csr"])
def test_fixed_split_of_decode_with_lengths_on_the_gpu(form: str, device: str) -> None:
    """The workspace is then sized by the page table."""
    case = bf16(DECODE, device, causal=False, arrays="device", plan_options={"fixed_split_size": 8})
    if form == "dense":
        table = torch.zeros(len(case.lens), 190, dtype=torch.int32)
        for r, row in enumerate(table):
            pages = case.paged.indices[case.paged.indptr[r] : case.paged.indptr[r + 1]]
            row[: len(pages)] = pages
        lens = torch.tensor([kv for _, kv in case.lens], dtype=torch.int32)
        dense = {"block_tables": table.to(device), "seq_lens": lens.to(device)}
        case = dataclasses.replace(case, plan_options=case.plan_options | dense)
    result = case.run_decode()
    case.compare(result)
    on_host = dataclasses.replace(case, arrays="host", plan_options={"fixed_split_size": 8})
    for a, b in zip(result, on_host.run_decode(), strict=True):
        assert torch.equal(a, b)


def test_out_of_memory_passes_through_and_leaves_the_wrapper_usable(device: str) -> None:
    case = bf16(PREFILL, device)
    made(case)
    wrapper = prefill_wrapper(case)
    torch.cuda.empty_cache()
    hog = []
    try:
        for size in (2**30, 2**24, 2**21):
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                while True:
                    hog.append(torch.empty(size, dtype=torch.uint8, device=device))
        with pytest.raises(torch.cuda.OutOfMemoryError):
            case.plan_paged(wrapper)
    finally:
        hog.clear()
        torch.cuda.empty_cache()
    with pytest.raises(RuntimeError, match="plan"):
        wrapper.run(case.q, case.cache)
    case.plan_paged(wrapper)
    case.compare(wrapper.run(case.q, case.cache, return_lse=True))
