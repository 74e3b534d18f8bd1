"""Attention on a GPU beyond what every device has: no waiting, streams, FP8 caches, faults, memory."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from gpu_cases import DECODE, HEADS, PREFILL, bf16, decode_wrapper, made, on_a_gpu, prefill_wrapper  # noqa: F401

import flashinfer_core
from flashinfer_core.attention import AttentionPlan
from flashinfer_core.testing import AttentionCase, embed, no_waiting, workspace


@pytest.mark.parametrize("arrays", ["host", "device", "mixed"])
@pytest.mark.parametrize("mode", ["NONE", "ALIBI", "ROPE_LLAMA"])
def test_plan_and_run_wait_for_nothing(arrays: str, mode: str, device: str) -> None:
    """flashinfer-ai/flashinfer#565 and #5264, sgl-project/sglang#23500."""
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


def test_streams(device: str) -> None:
    """flashinfer-ai/flashinfer#349: a plan on one stream and its run on another, and many steps on a side stream."""
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
    """flashinfer-ai/flashinfer#2085 and vllm-project/vllm#31843."""
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
    with pytest.raises(ValueError, match=r"^qo_indptr: expected a tensor on cpu"):
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
