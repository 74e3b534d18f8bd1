"""Attention: faults that users of such libraries reported, with the right values, as far as no other file has them."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import mmap
from typing import Any

import pytest
import torch

import flashinfer_core
from flashinfer_core import page, reference
from flashinfer_core.testing import AttentionCase, assert_attention_close, workspace

FORMS = ("decode", "paged", "ragged")
BF16 = torch.bfloat16


def gpu(device: str) -> None:
    if not device.startswith("cuda"):
        pytest.skip("for a GPU")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("qo", [1, 3])
def test_requests_without_keys(qo: int, form: str, device: str) -> None:
    """flashinfer-ai/flashinfer#4484, #440 and #353: O = 0 and LSE = -inf for them, the others as ever."""
    case = AttentionCase(((qo, 30), (qo, 7), (qo, 0), (qo, 19))).on(device)
    out, lse = getattr(case, f"run_{form}")()
    assert torch.all(out[2 * qo : 3 * qo] == 0)
    assert torch.all(lse[2 * qo : 3 * qo] == -math.inf)
    case.compare((out, lse))
    empty = [t[:0] for t in case.ragged]
    out, lse = flashinfer_core.single_prefill_with_kv_cache(case.q, *empty, causal=qo > 1, return_lse=True)
    assert torch.all(out == 0)
    assert torch.all(lse == -math.inf)


@pytest.mark.parametrize("form", FORMS)
def test_finite_logits_far_below_zero(form: str, device: str) -> None:
    """flashinfer-ai/flashinfer#4450: two keys of logit -46341 are not taken for masked ones."""
    case = AttentionCase(((1, 2),), causal=False, sm_scale=46341.0 / 64 / 1e4).on(device)
    for t, value in ((case.q, 1.0), (case.kv[0][0], -1e4), (case.kv[0][1], 1.0)):
        t.fill_(value)
    out, lse = getattr(case, f"run_{form}")()
    assert torch.all(out == 1)
    torch.testing.assert_close(lse.cpu(), torch.full((1, 4), -66854.86), rtol=1e-5, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_soft_cap_comes_after_the_scale(form: str, device: str) -> None:
    """flashinfer-ai/flashinfer#1193: softmax of cap * tanh(q k sm_scale / cap)."""
    qo = 1 if form == "decode" else 3
    case = AttentionCase(((qo, 40), (qo, 9)), causal=False, logits_soft_cap=30.0, sm_scale=0.25).on(device)
    case.q.mul_(10)
    out, _ = getattr(case, f"run_{form}")()
    q, (k, v) = case.q[:qo].cpu().double(), (t.double().repeat_interleave(2, 1) for t in case.kv[0])
    weights = torch.softmax(30 * torch.tanh(torch.einsum("qhd,khd->hqk", q, k) * 0.25 / 30), -1)
    expected = torch.einsum("hqk,khd->qhd", weights, v)
    torch.testing.assert_close(out[:qo].cpu().double(), expected, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("form", ["decode", "paged"])
@pytest.mark.parametrize("page_size", [1, 3, 256, 512])
def test_page_sizes(page_size: int, form: str, device: str) -> None:
    """flashinfer-ai/flashinfer#320 and #4347: any page size; a last page is no longer than a page."""
    case = AttentionCase(((1, 700), (1, 5), (1, 512)), page_size=page_size).on(device)
    case.check(form)
    wrong = {"last_page_len": torch.tensor([page_size + 1, 1, 1], dtype=torch.int32)}
    full = dataclasses.replace(case)
    object.__setattr__(full, "paged", case.paged._replace(**wrong))
    with pytest.raises(ValueError, match=r"last_page_len: expected"):
        getattr(full, f"run_{form}")()


@pytest.mark.parametrize("heads", [(28, 4), (40, 8), (24, 8)])
def test_group_sizes(heads: tuple[int, int], device: str) -> None:
    """flashinfer-ai/flashinfer#996, #254 and #258: groups of 7, 5 and 3 query heads."""
    AttentionCase(((1, 300), (1, 17)), *heads, 64).on(device).check(*FORMS)
    AttentionCase(((40, 300), (5, 5)), *heads, 64).on(device).check("paged", "ragged")


def test_head_dim_224(device: str) -> None:
    """flashinfer-ai/flashinfer#528."""
    AttentionCase(((1, 300), (1, 17)), head_dim_qk=224).on(device).check(*FORMS)


def test_views_of_a_fused_projection(device: str) -> None:
    """flashinfer-ai/flashinfer#311 and #1865: q, k and v as slices of one tensor, equal to contiguous ones."""
    case = AttentionCase(((5, 5), (9, 9), (1, 1))).on(device)
    qkv = torch.randn(15, (4 + 2 + 2) * 64).to(device, case.dtype)
    q, k, v = (t.view(15, -1, 64) for t in qkv.split((4 * 64, 2 * 64, 2 * 64), dim=1))
    assert not any(t.is_contiguous() for t in (q, k, v))
    ragged = flashinfer_core.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    case.plan_ragged(ragged)
    paged = flashinfer_core.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    case.plan_paged(paged)
    single = flashinfer_core.single_prefill_with_kv_cache
    assert torch.equal(ragged.run(q, k, v), ragged.run(q.contiguous(), k.contiguous(), v.contiguous()))
    assert torch.equal(paged.run(q, case.cache), paged.run(q.contiguous(), case.cache))
    assert torch.equal(single(q, k, v), single(q.contiguous(), k.contiguous(), v.contiguous()))


def test_strides_of_singleton_dimensions(device: str) -> None:
    """vllm-project/vllm#32452: the stride of a dimension of size 1 says nothing, however odd."""
    case = AttentionCase(((1, 20),), 1, 1, page_size=1, causal=False).on(device)

    def odd(t: torch.Tensor) -> torch.Tensor:
        t = t.contiguous()
        return t.as_strided(t.shape, [77 if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True)])

    strange = dataclasses.replace(case)
    object.__setattr__(strange, "q", odd(case.q))
    object.__setattr__(strange, "cache", tuple(odd(t) for t in case.cache))
    assert strange.q.stride() == (77, 77, 1)
    case.compare(strange.run_decode())


def test_scattered_pages_give_the_numbers_of_neighbours(device: str) -> None:
    """flashinfer-ai/flashinfer#3219: the same keys in neighbouring pages and all over a pool four times as large."""
    case = AttentionCase(((1, 700), (1, 33)), 16, 2, causal=False).on(device)
    count = len(case.cache[0])
    places = {"beside": torch.arange(count), "apart": torch.randperm(4 * count)[:count]}
    results = []
    for where in places.values():
        moved = dataclasses.replace(case)
        pool = [t.new_full((4 * count, *t.shape[1:]), math.nan) for t in case.cache]
        for to, t in zip(pool, case.cache, strict=True):
            to[where.to(device)] = t
        object.__setattr__(moved, "cache", tuple(pool))
        object.__setattr__(moved, "paged", case.paged._replace(indices=where[case.paged.indices.long()].int()))
        results.append(moved.run_decode())
    case.compare(results[0])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_decode_after_prefill(device: str) -> None:
    """vllm-project/vllm#7176: tokens that decode adds to a cache, with groups of 4 in bfloat16."""
    tokens, prompt, heads = 40, 30, (8, 2, 128)
    q, k, v = (torch.randn(tokens, n, 128).to(device, BF16) for n in (8, 2, 2))
    cache = torch.full((9, 2, 16, 2, 128), math.nan, device=device, dtype=BF16)
    prefill = flashinfer_core.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    decode = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    pieces = []
    for begin, end in [(0, prompt), *((i, i + 1) for i in range(prompt, tokens))]:
        pages = [5, 2, 7][: -(-end // 16)]
        values = ([0, len(pages)], pages, [(end - 1) % 16 + 1], [0, end])
        indptr, indices, last, qo_indptr = (torch.tensor(x, dtype=torch.int32, device=device) for x in values)
        positions = torch.arange(begin, end, device=device)
        new = (k[begin:end], v[begin:end], positions * 0, positions)
        page.append_paged_kv_cache(*new, cache, indices, indptr, last)
        wrapper: Any = prefill if begin == 0 else decode
        arrays = (indptr, indices, last)
        if begin == 0:
            prefill.plan(qo_indptr, *arrays, *heads, 16, causal=True, q_data_type=BF16)
        else:
            decode.plan(*arrays, *heads, 16, q_data_type=BF16)
        pieces.append(wrapper.run(q[begin:end], cache, return_lse=True))
    out, lse = zip(*pieces, strict=True)
    expected = reference.attention(q.cpu(), k.cpu(), v.cpu(), causal=True)
    assert_attention_close((torch.cat(out), torch.cat(lse)), expected, BF16)


def at_the_end_of_memory(t: torch.Tensor) -> torch.Tensor:
    """Return a copy whose last byte is the last that may be read: what reads past it ends with a fault.

    On a GPU that is so if nothing is mapped after the memory that torch gets for a block of this size.
    """
    if t.is_cpu:
        size = -(-t.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = torch.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), dtype=torch.uint8)
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(whole.data_ptr() + size), mmap.PAGESIZE, 0)
    else:
        size = 2**25
        whole = torch.empty(size, dtype=torch.uint8, device=t.device)
    copy = whole[size - t.nbytes : size].view(t.dtype).view(t.shape)
    copy.copy_(t)
    return copy


@pytest.mark.parametrize("dim", [64, 33])
def test_nothing_is_read_past_the_end(dim: int, device: str) -> None:
    """flashinfer-ai/flashinfer#1005: 5 queries, 131 keys, a mask of exactly as many bits, and all else as tight."""
    case = AttentionCase(((5, 131),), head_dim_qk=dim, page_size=131, custom_mask=True).on(device)
    mask = flashinfer_core.packbits(case.flat_masks, "little")
    assert mask.numel() == 82
    tight = dataclasses.replace(
        case, plan_options={"custom_mask": None, "packed_custom_mask": at_the_end_of_memory(mask)}
    )
    own = case.cache[0][case.paged.indices.to(device)], case.cache[1][case.paged.indices.to(device)]
    object.__setattr__(tight, "q", at_the_end_of_memory(case.q))
    object.__setattr__(tight, "cache", tuple(at_the_end_of_memory(t) for t in own))
    object.__setattr__(tight, "paged", case.paged._replace(indices=torch.zeros(1, dtype=torch.int32)))
    object.__setattr__(tight, "ragged", tuple(at_the_end_of_memory(t) for t in case.ragged))
    case.compare(tight.run_paged())
    case.compare(tight.run_ragged())


def test_keys_before_the_window_are_not_read(device: str) -> None:
    """flashinfer-ai/flashinfer#714: groups of 8 heads; the walk over the keys begins where the window does."""
    qo, kv, window = 8, 32768, 127
    case = AttentionCase(((qo, kv),), 8, 1, window_left=window).on(device)
    k, v = (t.clone() for t in case.ragged)
    k[: kv - qo - window] = v[: kv - qo - window] = math.nan
    result = flashinfer_core.single_prefill_with_kv_cache(
        case.q, k, v, causal=True, window_left=window, return_lse=True
    )
    case.compare(result)


@pytest.mark.parametrize("arrays", ["host", "device"])
def test_plan_does_not_wait_for_a_busy_gpu(arrays: str, device: str) -> None:
    """flashinfer-ai/flashinfer#565, #690, #5264 and sgl-project/sglang#23500."""
    gpu(device)
    lens = tuple((1, 100 + i) for i in range(128))
    case = AttentionCase(lens, 32, 8, 128, dtype=BF16, device=device, causal=False, arrays=arrays)
    placed = case.placed[2]
    decode = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper(workspace(device))

    def plan() -> None:
        decode.plan(*placed, 32, 8, 128, 16, q_data_type=BF16)

    plan()
    q, cache = case.q, case.cache
    for _ in range(2):  # the first time compiles and allocates
        decode.run(q, cache)
        torch.cuda.synchronize()
        torch.cuda._sleep(400_000_000)  # a fifth of a second
        slept = torch.cuda.Event()
        slept.record()
        plan()
        result = decode.run(q, cache, return_lse=True)
        waited = slept.query()
    assert not waited
    case.compare(result)


@pytest.mark.parametrize("form", FORMS)
def test_scales_of_fp8_keys_and_values(form: str, device: str) -> None:
    """flashinfer-ai/flashinfer#1023: k_scale is a factor of the logits, v_scale of the output, for FP8 caches too."""
    gpu(device)
    case = AttentionCase(
        ((1, 900), (1, 40)), 8, 2, 128, dtype=BF16, kv_dtype=torch.float8_e4m3fn, causal=False, device=device
    )
    wrappers: dict[str, Any] = {
        "decode": flashinfer_core.BatchDecodeWithPagedKVCacheWrapper,
        "paged": flashinfer_core.BatchPrefillWithPagedKVCacheWrapper,
        "ragged": flashinfer_core.BatchPrefillWithRaggedKVCacheWrapper,
    }
    wrapper = wrappers[form](workspace(device))
    getattr(case, f"plan_{form}")(wrapper)
    keys = case.ragged if form == "ragged" else (case.cache,)
    actual = wrapper.run(case.q, *keys, k_scale=2.0, v_scale=3.0, return_lse=True)
    out, lse = dataclasses.replace(case, sm_scale=2 * 128**-0.5).expected()
    assert_attention_close(actual, (out * 3, lse), BF16)


@pytest.mark.parametrize(
    ("batch", "kv", "heads"), [(256, 32768, (64, 8, 128)), (528, 4096, (64, 4, 256))], ids=["#362", "#40023"]
)
def test_workspace_does_not_grow_with_the_batch(batch: int, kv: int, heads: tuple[int, int, int], device: str) -> None:
    """flashinfer-ai/flashinfer#362, vllm-project/vllm#40023 and #25342, pie-project/pie#414: 64 MiB are enough.

    All requests have the same keys, and so the same result.
    """
    gpu(device)
    case = AttentionCase(((1, kv),), *heads, dtype=BF16, causal=False, device=device)
    wrapper = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(64 * 2**20, dtype=torch.uint8, device=device)
    )
    pages = len(case.paged.indices)
    table = (
        torch.arange(batch + 1, dtype=torch.int32) * pages,
        case.paged.indices.repeat(batch),
        case.paged.last_page_len.repeat(batch),
    )
    needed = wrapper.workspace_size(*table, *heads, 16, q_data_type=BF16)[0]
    assert needed == wrapper.workspace_size(*case.paged, *heads, 16, q_data_type=BF16)[0]
    wrapper.plan(*table, *heads, 16, q_data_type=BF16)
    actual = wrapper.run(case.q.repeat(batch, 1, 1), case.cache, return_lse=True)
    out, lse = case.run_decode()
    assert_attention_close(actual, (out.float().repeat(batch, 1, 1), lse.repeat(batch, 1)), BF16)


@pytest.mark.parametrize("form", FORMS)
def test_gpu_that_is_not_the_current_one(form: str, device: str) -> None:
    """flashinfer-ai/flashinfer#924 and #452, deepseek-ai/FlashMLA#158."""
    gpu(device)
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    with torch.cuda.device(0):
        AttentionCase(((1, 900), (1, 40)), 8, 2, 128, dtype=BF16, device="cuda:1").check(form)
        assert torch.cuda.current_device() == 0
