"""Every attention wrapper and the single-request functions against the reference, on drawn shapes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flashinfer_core
from flashinfer_core.attention import AttentionPlan
from flashinfer_core.testing import AttentionCase, assert_attention_close, embed, workspace
from flashinfer_core.testing.attention import TOLERANCE

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEADS = (4, 2, 64)


@st.composite
def cases(draw: st.DrawFn, decode: bool = False) -> AttentionCase:
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    group = draw(st.sampled_from([1, 2, 3, 5, 7, 8, 16]))
    kv_len = st.one_of(st.integers(0, 40), st.sampled_from([127, 128, 129, 300, 700]))
    qo_len = st.just(draw(st.integers(1, 4))) if decode else st.one_of(st.integers(0, 9), st.sampled_from([33, 150]))
    lens = tuple(draw(st.lists(st.tuples(qo_len, kv_len), max_size=5)))
    mode = draw(st.sampled_from(["NONE", "NONE", "ALIBI", "ROPE_LLAMA"]))
    dim = draw(st.sampled_from([1, 8, 33, 64, 80, 96, 112, 128, 192, 256]))
    if mode == "ROPE_LLAMA":
        dim += dim % 2
    return AttentionCase(
        lens=lens,
        num_qo_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim_qk=dim,
        head_dim_vo=None if decode else draw(st.sampled_from([None, 16, 17, 128, 256])),
        page_size=draw(st.sampled_from([1, 3, 16, 128])),
        dtype=draw(st.sampled_from(DTYPES)),
        kv_layout=draw(st.sampled_from(["NHD", "HND"])),
        packed_kv=draw(st.booleans()),
        gap=draw(st.sampled_from([0, 0, 0, 8, 1, 5])),
        skew=draw(st.sampled_from([1, 8])),
        causal=(lens[0][0] > 1 if lens else False) if decode else draw(st.booleans()),
        window_left=draw(st.sampled_from([-1, -1, 0, 5, 150])),
        logits_soft_cap=draw(st.sampled_from([0.0, 0.0, 3.0])),
        sinks=draw(st.booleans()),
        pos_encoding_mode=mode,
        plan_options=draw(
            st.sampled_from([{}, {}, {"disable_split_kv": True}, {"fixed_split_size": 2}, {"fixed_split_size": 7}])
        ),
        seed=draw(st.integers(0, 2**16)),
        arrays=draw(st.sampled_from(["host", "device", "mixed"])),
    )


# Head dims that a GPU is tested with in place of those drawn: each is a kernel that has to be compiled.
GPU_DIMS = {1: 33, 8: 33, 16: 64, 17: 33, 96: 128, 112: 128}


def on(case: AttentionCase, device: str) -> AttentionCase:
    """Return a drawn case for a device; for a GPU one of fewer kernels, and one that it does not refuse."""
    if device == "cpu":
        return case
    dim = 64 if case.head_dim_qk < 64 and case.pos_encoding_mode == "ROPE_LLAMA" else case.head_dim_qk
    dim = GPU_DIMS.get(dim, dim)
    return dataclasses.replace(
        case.on(device),
        head_dim_qk=dim,
        head_dim_vo=128 if dim == 192 and case.head_dim_vo is not None else None,
        dtype=torch.float16 if dim in (33, 80, 192) else torch.bfloat16,
        logits_soft_cap={"NONE": case.logits_soft_cap, "ALIBI": 3.0, "ROPE_LLAMA": 0.0}[case.pos_encoding_mode],
        arrays="host" if "fixed_split_size" in case.plan_options else case.arrays,
    )


@given(case=cases())
def test_paged_prefill(case: AttentionCase, device: str) -> None:
    on(case, device).check("paged")


@given(case=cases(decode=True))
def test_decode(case: AttentionCase, device: str) -> None:
    on(case, device).check("decode")


@given(case=cases())
def test_ragged_prefill(case: AttentionCase, device: str) -> None:
    dataclasses.replace(on(case, device), sinks=False).check("ragged")


@given(case=cases(), packed=st.booleans())
def test_custom_mask(case: AttentionCase, packed: bool, device: str) -> None:
    """flashinfer-ai/flashinfer#2201: a packed mask whose requests are not whole bytes equals a boolean one."""
    case = dataclasses.replace(on(case, device), custom_mask=True, sinks=False)
    if packed:
        flat = torch.cat([torch.empty(0, dtype=torch.bool), *(m.flatten() for m in case.masks)])
        indptr = torch.tensor([0, *(m.numel() for m in case.masks)]).cumsum(0)
        bits, _ = flashinfer_core.segment_packbits(flat, indptr, "little")
        options = case.plan_options | {"custom_mask": None, "packed_custom_mask": bits.to(device)}
        case = dataclasses.replace(case, plan_options=options)
    case.check("paged", "ragged")


@given(case=cases(), lse_wanted=st.booleans())
def test_single(case: AttentionCase, lse_wanted: bool, device: str) -> None:
    case = dataclasses.replace(on(case, device), sinks=False, lens=case.lens[:1] or ((3, 5),))
    options = {
        "kv_layout": case.kv_layout,
        "window_left": case.window_left,
        "logits_soft_cap": case.logits_soft_cap,
        "pos_encoding_mode": case.pos_encoding_mode,
    }
    actual = flashinfer_core.single_prefill_with_kv_cache(
        case.q, *case.ragged, causal=case.causal, o_dtype=torch.float32, return_lse=True, **options
    )
    assert actual[0].dtype == torch.float32
    case.compare(actual)
    case = dataclasses.replace(case, lens=((1, case.lens[0][1]),), causal=False)
    expected = case.expected()
    actual = flashinfer_core.single_decode_with_kv_cache(case.q[0], *case.ragged, return_lse=lse_wanted, **options)
    if lse_wanted:
        case.compare((actual[0][None], actual[1][None]), expected)
    else:
        case.compare((actual[None], expected[1]), expected)


@given(case=cases())
def test_dense_block_table_equals_csr(case: AttentionCase, device: str) -> None:
    case = on(case, device)
    indptr, indices = case.paged.indptr, case.paged.indices
    table = torch.full((len(case.lens), 60 + 8), -1, dtype=torch.int32)[:, : int(max([1, *indptr.diff().tolist()]))]
    for r in range(len(case.lens)):
        pages = indices[indptr[r] : indptr[r + 1]]
        if len(pages) > table.shape[1]:
            return
        table[r, : len(pages)] = pages
    lens = torch.tensor([kv for _, kv in case.lens], dtype=torch.int32)
    if case.arrays != "host":
        table = table.to(device)
    if case.arrays == "device":
        lens = lens.to(device)
    dense = dataclasses.replace(case, plan_options={**case.plan_options, "block_tables": table, "seq_lens": lens})
    for a, b in zip(case.run_paged(), dense.run_paged(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", [{"fixed_split_size": 8}, {"disable_split_kv": True}])
def test_result_does_not_depend_on_the_batch(dtype: torch.dtype, option: dict[str, object], device: str) -> None:
    """flashinfer-ai/flashinfer#1675 and #696."""
    if device != "cpu" and dtype == torch.float32:
        pytest.skip("no float32 kernel on a GPU")
    lens = ((1, 900), (1, 17), (40, 300), (5, 5), (1, 2000), (130, 130))
    case = AttentionCase(lens, 6, 2, 64, dtype=dtype, plan_options=option, device=device)
    together = case.run_paged()
    for r, (qo, kv) in enumerate(lens):
        begin, end = case.paged.indptr[r : r + 2].tolist()
        alone = dataclasses.replace(case, lens=((qo, kv),))
        rows = slice(int(case.qo_indptr[r]), int(case.qo_indptr[r + 1]))
        object.__setattr__(alone, "q", case.q[rows])
        object.__setattr__(alone, "cache", case.cache)
        object.__setattr__(
            alone,
            "paged",
            case.paged._replace(
                indptr=torch.tensor([0, end - begin], dtype=torch.int32),
                indices=case.paged.indices[begin:end],
                last_page_len=case.paged.last_page_len[r : r + 1],
            ),
        )
        for a, b in zip(alone.run_paged(), together, strict=True):
            assert torch.equal(a, b[rows])


def test_repeats_are_bit_identical(device: str) -> None:
    """sgl-project/sglang#24853."""
    case = AttentionCase(((1, 5000), (3, 1000), (200, 700)), 8, 2, 128, dtype=torch.bfloat16, device=device)
    first = case.run_paged()
    for _ in range(20 if device == "cpu" else 100):
        assert all(torch.equal(a, b) for a, b in zip(first, case.run_paged(), strict=True))


def test_long_requests_are_split_over_threads() -> None:
    plan = AttentionPlan(
        1,
        torch.tensor([65536], dtype=torch.int32),
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim_qk=64,
    )
    assert plan._batch.num_splits == (1 if torch.get_num_threads() > 1 else 0)


def test_split_lse_equals_unsplit_at_65536(device: str) -> None:
    """flashinfer-ai/flashinfer#499."""
    case = AttentionCase(((1, 65536),), 4, 1, 64).on(device)
    case.compare(flashinfer_core.single_prefill_with_kv_cache(case.q, *case.ragged, return_lse=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_key_gives_zero_and_minus_infinity(dtype: torch.dtype, device: str) -> None:
    case = AttentionCase(((2, 9), (1, 0), (3, 2)), dtype=dtype).on(device)
    out, lse = case.run_paged()
    assert torch.all(out[2] == 0)
    assert torch.all(lse[2] == -math.inf)
    # Three queries over two keys, bottom-right: the first sees none.
    assert torch.all(out[3] == 0)
    assert torch.all(lse[3] == -math.inf)
    case.check("paged", "ragged")


def test_logits_far_below_zero_are_not_taken_for_masked(device: str) -> None:
    ones = torch.ones(2, 1, 64, device=device, dtype=torch.float32 if device == "cpu" else torch.float16)
    out, lse = flashinfer_core.single_decode_with_kv_cache(
        ones[0], ones * -1e4, ones, sm_scale=46341.0 / 64 / 1e4, return_lse=True
    )
    assert torch.equal(out, ones[0])
    torch.testing.assert_close(lse.cpu(), torch.tensor([-46341.0 * math.log2(math.e) + 1]), rtol=1e-5, atol=0)


def test_outlier_activations(device: str) -> None:
    """sgl-project/sglang#13044."""
    case = AttentionCase(((50, 200),), 8, 2, 128, dtype=torch.bfloat16, device=device)
    case.kv[0][0].mul_(300)
    case.check("paged")


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_stay_in_their_rows(where: str, value: float, device: str) -> None:
    case = AttentionCase(((3, 20), (2, 30)), 4, 2, 64).on(device)
    if where == "q":
        case.q[1, 2, 5] = value
    else:
        case.kv[0]["kv".index(where)][7, 1, 3] = value
    out, lse = (t.cpu() for t in case.run_paged())
    expected_out, expected_lse = case.expected()
    finite, tolerance = expected_out.isfinite(), TOLERANCE[case.dtype]
    torch.testing.assert_close(out[finite].float(), expected_out[finite], rtol=tolerance, atol=tolerance)
    assert not out[~finite].isfinite().any() or where == "k"
    torch.testing.assert_close(lse[3:], expected_lse[3:], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("scale", [float, torch.tensor])
def test_scales_apply_in_every_wrapper(scale: type, device: str) -> None:
    """flashinfer-ai/flashinfer#1023."""
    case = AttentionCase(((1, 30), (1, 5)), *HEADS, causal=False).on(device)
    scaled = dataclasses.replace(case, sm_scale=64**-0.5 * 2 * 0.5 * 3)
    expected = (scaled.expected()[0] * 7, scaled.expected()[1])

    def given(value: float) -> Any:
        return scale(value).to(device) if scale is torch.tensor else value

    scales = {"q_scale": 2 * 0.5, "k_scale": given(3.0), "v_scale": given(7.0), "return_lse": True}
    decode = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    case.plan_decode(decode)
    prefill = flashinfer_core.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    case.plan_paged(prefill)
    ragged = flashinfer_core.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    case.plan_ragged(ragged)
    assert_attention_close(decode.run(case.q, case.cache, **scales), expected, case.dtype)
    assert_attention_close(prefill.run(case.q, case.cache, **scales), expected, case.dtype)
    assert_attention_close(ragged.run(case.q, *case.ragged, **scales), expected, case.dtype)
    actual = ragged.run(case.q, *case.ragged, **scales, o_scale=given(2.0))
    assert_attention_close(actual, (expected[0] / 2, expected[1]), case.dtype)
    single = flashinfer_core.single_decode_with_kv_cache(
        case.q[0], *(t[:30] for t in case.ragged), q_scale=given(1.0), k_scale=3.0, v_scale=given(7.0)
    )
    assert_attention_close((single[None], expected[1][:1]), (expected[0][:1], expected[1][:1]), case.dtype)


def test_lse_base_and_layout(device: str) -> None:
    case = AttentionCase(((3, 30),)).on(device)
    wrapper = flashinfer_core.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    case.plan_paged(wrapper)
    _, log2 = wrapper.run(case.q, case.cache, return_lse=True)
    _, ln = wrapper.run(case.q, case.cache, return_lse=True, lse_base="ln", lse_layout="HN")
    assert ln.shape == (4, 3)
    torch.testing.assert_close(ln.T, log2 * math.log(2))


def test_a_new_plan_forgets_the_mask_of_the_old_one(device: str) -> None:
    """flashinfer-ai/flashinfer#860 and #1028."""
    masked = AttentionCase(((6, 30),), custom_mask=True, causal=False).on(device)
    plain = dataclasses.replace(masked, custom_mask=False, causal=True)
    wrapper = flashinfer_core.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    for case in (masked, plain):
        case.plan_paged(wrapper)
        case.compare(wrapper.run(case.q, case.cache, return_lse=True))


def test_window_given_at_run(device: str) -> None:
    """sgl-project/sglang#31501: exact, or refused if the plan was made for another."""
    case = AttentionCase(((6, 300),), window_left=17).on(device)
    wrapper = flashinfer_core.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    dataclasses.replace(case, window_left=-1).plan_paged(wrapper)
    case.compare(wrapper.run(case.q, case.cache, window_left=17, return_lse=True))
    dataclasses.replace(case, window_left=9).plan_paged(wrapper)
    with pytest.raises(ValueError, match="window_left"):
        wrapper.run(case.q, case.cache, window_left=17)


def test_older_call_forms(device: str) -> None:
    case = AttentionCase(((1, 30), (1, 7)), window_left=12, logits_soft_cap=5.0, causal=False).on(device)
    decode = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    decode.begin_forward(*case.paged, *HEADS, 16, data_type=case.dtype)
    out = decode.forward_return_lse(case.q, case.cache, window_left=12, logits_soft_cap=5.0)
    decode.end_forward()
    case.compare(out)
    causal = AttentionCase(((9, 30), (2, 7))).on(device)
    prefill = flashinfer_core.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    prefill.begin_forward(causal.qo_indptr, *causal.paged, *HEADS, 16, q_data_type=causal.dtype)
    causal.compare(prefill.forward_return_lse(causal.q, causal.cache, causal=True))


@pytest.mark.parametrize("arrays", ["host", "device"])
def test_fixed_buffers(arrays: str, device: str) -> None:
    buffers = [torch.empty(n, dtype=torch.int32, device=device) for n in (3, 50, 2)]
    wrapper = flashinfer_core.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *buffers)
    assert wrapper.is_cuda_graph_enabled
    for lens in (((1, 30), (1, 0)), ((1, 2), (1, 300))):
        case = AttentionCase(lens, causal=False, arrays=arrays).on(device)
        case.plan_decode(wrapper)
        assert torch.equal(buffers[0].cpu(), case.paged.indptr)
        case.compare(wrapper.run(case.q, case.cache, return_lse=True))
    with pytest.raises(ValueError, match="paged_kv_indptr_buffer"):
        AttentionCase(((1, 3),), causal=False, arrays=arrays).on(device).plan_decode(wrapper)


def test_changing_the_page_table_after_plan_is_harmless(device: str) -> None:
    case = AttentionCase(((1, 100),), causal=False).on(device)
    expected, cache = case.expected(), case.cache
    wrapper = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    case.plan_decode(wrapper)
    case.paged.indices.fill_(2**30)
    case.compare(wrapper.run(case.q, cache, return_lse=True), expected)


@pytest.mark.parametrize("dim", [2, 8])  # 8 elements are the 16 bytes that a GPU copies at a time
def test_addresses_beyond_2_31_elements(dim: int, device: str) -> None:
    """flashinfer-ai/flashinfer#3136."""
    # One head every 2^20 elements: page 2100 begins past element 2^31. On the CPU untouched memory costs nothing.
    whole = torch.empty(2200 * 2**20, dtype=torch.float16, device=device)
    cache = whole.as_strided((2200, 1, 1, dim), (2**20, dim, dim, 1))
    cache[2100] = 3.0
    q = torch.ones(1, 1, dim, dtype=torch.float16, device=device)
    wrapper = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    table = [torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [2100], [1])]
    wrapper.plan(*table, 1, 1, dim, 1)
    assert torch.equal(wrapper.run(q, (cache, cache)), torch.full((1, 1, dim), 3.0, dtype=torch.float16, device=device))


def test_workspace_size(device: str) -> None:
    """vllm-project/vllm#40023 and #25342: known beforehand."""
    case = AttentionCase(((1, 3000), (1, 10)), *HEADS, causal=False).on(device)
    wrapper = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    floats, ints = wrapper.workspace_size(*case.paged, *HEADS, 16, q_data_type=case.dtype)
    if device == "cpu":
        assert (floats, ints) == (0, 0)
        return
    assert floats > 0
    assert ints > 0
    guarded = embed(torch.zeros(floats + 256, dtype=torch.uint8, device=device), gap=64, offset=64)
    wrapper = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper(guarded.view)
    before = torch.cuda.memory_allocated()
    case.plan_decode(wrapper)
    assert torch.cuda.memory_allocated() - before < floats
    case.compare(wrapper.run(case.q, case.cache, return_lse=True))
    assert guarded.view.any(), "the workspace was not used"
    guarded.assert_intact()
