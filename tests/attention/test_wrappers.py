"""Every attention wrapper and the single-request functions against the reference, on drawn shapes."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flashinfer_core
from flashinfer_core import reference
from flashinfer_core.attention import AttentionPlan
from flashinfer_core.testing import AttentionCase, assert_attention_close, workspace

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


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
        gap=draw(st.sampled_from([0, 0, 1, 5])),
        causal=(lens[0][0] > 1 if lens else False) if decode else draw(st.booleans()),
        window_left=draw(st.sampled_from([-1, -1, 0, 5, 150])),
        logits_soft_cap=draw(st.sampled_from([0.0, 0.0, 3.0])),
        sinks=draw(st.booleans()),
        pos_encoding_mode=mode,
        plan_options=draw(
            st.sampled_from([{}, {}, {"disable_split_kv": True}, {"fixed_split_size": 2}, {"fixed_split_size": 7}])
        ),
        seed=draw(st.integers(0, 2**16)),
    )


@given(cases())
def test_paged_prefill(case: AttentionCase) -> None:
    case.check("paged")


@given(cases(decode=True))
def test_decode(case: AttentionCase) -> None:
    case.check("decode")


@given(cases())
def test_ragged_prefill(case: AttentionCase) -> None:
    dataclasses.replace(case, sinks=False).check("ragged")


@given(cases(), st.booleans())
def test_custom_mask(case: AttentionCase, packed: bool) -> None:
    case = dataclasses.replace(case, custom_mask=True, sinks=False)
    if packed:
        flat = torch.cat([torch.empty(0, dtype=torch.bool), *(m.flatten() for m in case.masks)])
        indptr = torch.tensor([0, *(m.numel() for m in case.masks)]).cumsum(0)
        options = {
            "custom_mask": None,
            "packed_custom_mask": flashinfer_core.segment_packbits(flat, indptr, "little")[0],
        }
        case = dataclasses.replace(case, plan_options=options)
    case.check("paged", "ragged")


@given(cases(), st.booleans())
def test_single(case: AttentionCase, lse_wanted: bool) -> None:
    case = dataclasses.replace(case, sinks=False, lens=case.lens[:1] or ((3, 5),))
    (k, v), q = case.kv[0], case.q
    if case.kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    options = {
        "kv_layout": case.kv_layout,
        "window_left": case.window_left,
        "logits_soft_cap": case.logits_soft_cap,
        "pos_encoding_mode": case.pos_encoding_mode,
    }
    expected = case.expected()
    actual = flashinfer_core.single_prefill_with_kv_cache(
        q, k, v, causal=case.causal, o_dtype=torch.float32, return_lse=True, **options
    )
    assert_attention_close(actual, expected, case.dtype)
    case = dataclasses.replace(case, lens=((1, case.lens[0][1]),), causal=False)
    (k, v), q = case.kv[0], case.q
    if case.kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    expected = case.expected()
    actual = flashinfer_core.single_decode_with_kv_cache(q[0], k, v, return_lse=lse_wanted, **options)
    if lse_wanted:
        assert_attention_close((actual[0][None], actual[1][None]), expected, case.dtype)
    else:
        assert_attention_close((actual[None], expected[1]), expected, case.dtype)


@given(cases())
def test_dense_block_table_equals_csr(case: AttentionCase) -> None:
    indptr, indices = case.paged.indptr, case.paged.indices
    table = torch.full((len(case.lens), 60 + 8), -1, dtype=torch.int32)[:, : int(max([1, *indptr.diff().tolist()]))]
    for r in range(len(case.lens)):
        pages = indices[indptr[r] : indptr[r + 1]]
        if len(pages) > table.shape[1]:
            return
        table[r, : len(pages)] = pages
    lens = torch.tensor([kv for _, kv in case.lens], dtype=torch.int32)
    dense = dataclasses.replace(case, plan_options={**case.plan_options, "block_tables": table, "seq_lens": lens})
    for a, b in zip(case.run_paged(), dense.run_paged(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", [{"fixed_split_size": 8}, {"disable_split_kv": True}])
def test_result_does_not_depend_on_the_batch(dtype: torch.dtype, option: dict[str, object]) -> None:
    lens = ((1, 900), (1, 17), (40, 300), (5, 5), (1, 2000), (130, 130))
    case = AttentionCase(lens, 6, 2, 64, dtype=dtype, plan_options=option)
    together = case.run_paged()
    for r, (qo, kv) in enumerate(lens):
        begin, end = case.paged.indptr[r : r + 2].tolist()
        alone = AttentionCase(((qo, kv),), 6, 2, 64, dtype=dtype, plan_options=option)
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


def test_repeats_are_bit_identical() -> None:
    case = AttentionCase(((1, 5000), (3, 1000), (200, 700)), 8, 2, 128, dtype=torch.bfloat16)
    first = case.run_paged()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, case.run_paged(), strict=True))


def test_long_requests_are_split_over_threads() -> None:
    plan = AttentionPlan(
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([65536], dtype=torch.int32),
        kv_start=torch.zeros(1, dtype=torch.int64),
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim_qk=64,
    )
    assert plan.num_splits == (1 if torch.get_num_threads() > 1 else 0)


def test_split_lse_equals_unsplit_at_65536() -> None:
    k, v, q = torch.randn(65536, 1, 64), torch.randn(65536, 1, 64), torch.randn(1, 4, 64)
    expected = reference.attention(q, k, v)
    actual = flashinfer_core.single_prefill_with_kv_cache(q, k, v, return_lse=True)
    assert_attention_close(actual, expected, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_key_gives_zero_and_minus_infinity(dtype: torch.dtype) -> None:
    case = AttentionCase(((2, 9), (1, 0), (3, 2)), dtype=dtype)
    out, lse = case.run_paged()
    assert torch.all(out[2] == 0)
    assert torch.all(lse[2] == -math.inf)
    # Three queries over two keys, bottom-right: the first sees none.
    assert torch.all(out[3] == 0)
    assert torch.all(lse[3] == -math.inf)
    case.check("paged", "ragged")


def test_logits_far_below_zero_are_not_taken_for_masked() -> None:
    k = torch.full((2, 1, 64), -1e4)
    out, lse = flashinfer_core.single_decode_with_kv_cache(
        torch.full((1, 64), 1.0), k, torch.ones(2, 1, 64), sm_scale=46341.0 / 64 / 1e4, return_lse=True
    )
    assert torch.equal(out, torch.ones(1, 64))
    torch.testing.assert_close(lse, torch.tensor([-46341.0 * math.log2(math.e) + 1]), rtol=1e-5, atol=0)


def test_outlier_activations() -> None:
    case = AttentionCase(((50, 200),), 8, 2, 128, dtype=torch.bfloat16)
    case.kv[0][0].mul_(300)
    case.check("paged")


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_stay_in_their_rows(where: str, value: float) -> None:
    case = AttentionCase(((3, 20), (2, 30)), 4, 2, 64)
    if where == "q":
        case.q[1, 2, 5] = value
    else:
        case.kv[0]["kv".index(where)][7, 1, 3] = value
    out, lse = case.run_paged()
    expected_out, expected_lse = case.expected()
    finite = expected_out.isfinite()
    torch.testing.assert_close(out[finite], expected_out[finite], rtol=2e-5, atol=2e-5)
    assert not out[~finite].isfinite().any() or where == "k"
    torch.testing.assert_close(lse[3:], expected_lse[3:], rtol=2e-5, atol=2e-5)


def test_scales_apply_in_every_wrapper() -> None:
    case = AttentionCase(((1, 30), (1, 5)), 4, 2, 64, causal=False)
    scaled = dataclasses.replace(case, sm_scale=64**-0.5 * 2 * 0.5 * 3)
    expected = (scaled.expected()[0] * 7, scaled.expected()[1])
    k, v = torch.cat([k for k, _ in case.kv]), torch.cat([v for _, v in case.kv])
    scales = {"q_scale": 2 * 0.5, "k_scale": torch.tensor([3.0]), "v_scale": 7.0, "return_lse": True}
    heads = (4, 2, 64)
    decode = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper(workspace())
    decode.plan(*case.paged, *heads, 16, q_data_type="float32")
    prefill = flashinfer_core.BatchPrefillWithPagedKVCacheWrapper(workspace())
    prefill.plan(case.qo_indptr, *case.paged, *heads, 16, q_data_type="float32")
    ragged = flashinfer_core.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    ragged.plan(case.qo_indptr, case.kv_indptr, *heads, q_data_type="float32")
    assert_attention_close(decode.run(case.q, case.cache, **scales), expected, torch.float32)
    assert_attention_close(prefill.run(case.q, case.cache, **scales), expected, torch.float32)
    assert_attention_close(ragged.run(case.q, k, v, **scales), expected, torch.float32)
    out, _ = ragged.run(case.q, k, v, **scales, o_scale=2.0)
    torch.testing.assert_close(out, expected[0] / 2, rtol=2e-5, atol=2e-5)


def test_lse_base_and_layout() -> None:
    case = AttentionCase(((3, 30),))
    wrapper = flashinfer_core.BatchPrefillWithPagedKVCacheWrapper(workspace())
    wrapper.plan(case.qo_indptr, *case.paged, 4, 2, 64, 16, causal=True, q_data_type=torch.float32)
    _, log2 = wrapper.run(case.q, case.cache, return_lse=True)
    _, ln = wrapper.run(case.q, case.cache, return_lse=True, lse_base="ln", lse_layout="HN")
    assert ln.shape == (4, 3)
    torch.testing.assert_close(ln.T, log2 * math.log(2))


def test_a_new_plan_forgets_the_mask_of_the_old_one() -> None:
    masked = AttentionCase(((6, 30),), custom_mask=True, causal=False)
    plain = dataclasses.replace(masked, custom_mask=False, causal=True)
    wrapper = flashinfer_core.BatchPrefillWithPagedKVCacheWrapper(workspace())
    for case in (masked, plain):
        wrapper.plan(case.qo_indptr, *case.paged, 4, 2, 64, 16, **case.options())
        assert_attention_close(wrapper.run(case.q, case.cache, return_lse=True), case.expected(), torch.float32)


def test_window_given_at_run() -> None:
    case = AttentionCase(((6, 300),), window_left=17)
    wrapper = flashinfer_core.BatchPrefillWithPagedKVCacheWrapper(workspace())
    plan = (case.qo_indptr, *case.paged, 4, 2, 64, 16)
    wrapper.plan(*plan, causal=True, q_data_type=torch.float32)
    out = wrapper.run(case.q, case.cache, window_left=17, return_lse=True)
    assert_attention_close(out, case.expected(), torch.float32)
    wrapper.plan(*plan, causal=True, window_left=9, q_data_type=torch.float32)
    with pytest.raises(ValueError, match="window_left"):
        wrapper.run(case.q, case.cache, window_left=17)


def test_older_call_forms() -> None:
    case = AttentionCase(((1, 30), (1, 7)), window_left=12, logits_soft_cap=5.0, causal=False)
    expected = case.expected()
    decode = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper(workspace())
    decode.begin_forward(*case.paged, 4, 2, 64, 16, data_type="float32")
    out = decode.forward_return_lse(case.q, case.cache, window_left=12, logits_soft_cap=5.0)
    decode.end_forward()
    assert_attention_close(out, expected, torch.float32)
    causal = AttentionCase(((9, 30), (2, 7)))
    prefill = flashinfer_core.BatchPrefillWithPagedKVCacheWrapper(workspace())
    prefill.begin_forward(causal.qo_indptr, *causal.paged, 4, 2, 64, 16, q_data_type="float32")
    out = prefill.forward_return_lse(causal.q, causal.cache, causal=True)
    assert_attention_close(out, causal.expected(), torch.float32)


def test_fixed_buffers() -> None:
    buffers = [torch.empty(n, dtype=torch.int32) for n in (3, 50, 2)]
    wrapper = flashinfer_core.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), *buffers)
    assert wrapper.is_cuda_graph_enabled
    for lens in (((1, 30), (1, 0)), ((1, 2), (1, 300))):
        case = AttentionCase(lens, causal=False)
        wrapper.plan(*case.paged, 4, 2, 64, 16, q_data_type=torch.float32)
        assert torch.equal(buffers[0], case.paged.indptr)
        assert_attention_close(wrapper.run(case.q, case.cache, return_lse=True), case.expected(), torch.float32)
    case = AttentionCase(((1, 3),))
    with pytest.raises(ValueError, match="paged_kv_indptr_buffer"):
        wrapper.plan(*case.paged, 4, 2, 64, 16)


def test_changing_the_page_table_after_plan_is_harmless() -> None:
    case = AttentionCase(((1, 100),), causal=False)
    expected, cache = case.expected(), case.cache
    wrapper = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*case.paged, 4, 2, 64, 16, q_data_type=torch.float32)
    case.paged.indices.fill_(2**30)
    assert_attention_close(wrapper.run(case.q, cache, return_lse=True), expected, torch.float32)


def test_addresses_beyond_2_31_elements() -> None:
    # One head of 2 elements every 2^20: page 2100 begins past element 2^31. Untouched memory costs nothing.
    cache = torch.empty(2200 * 2**20, dtype=torch.float16).as_strided((2200, 1, 1, 2), (2**20, 2, 2, 1))
    cache[2100] = 3.0
    q = torch.ones(1, 1, 2, dtype=torch.float16)
    wrapper = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper(workspace())
    table = [torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [2100], [1])]
    wrapper.plan(*table, 1, 1, 2, 1)
    assert torch.equal(wrapper.run(q, (cache, cache)), torch.full((1, 1, 2), 3.0, dtype=torch.float16))
