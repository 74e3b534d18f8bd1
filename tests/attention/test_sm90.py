"""The kernel for SM90 (`backend="fa3"`) against the reference: layouts, lengths, features, and what it refuses."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import pytest
import torch

import flashinfer_core
from flashinfer_core import reference
from flashinfer_core.testing import AttentionCase, assert_attention_close, poisoned_memory, workspace

Pair = tuple[torch.Tensor, torch.Tensor]
LENS = ((130, 130), (7, 1), (300, 777), (1, 500), (40, 40), (3, 0))


@pytest.fixture(autouse=True)
def on_hopper(device: str) -> None:
    if not device.startswith("cuda") or torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("for a GPU of compute capability 9.0")


def bf16(device: str, lens: tuple[tuple[int, int], ...] = LENS, **options: Any) -> AttentionCase:
    heads = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim_qk": 128}
    return AttentionCase(lens, **heads | {"dtype": torch.bfloat16, "skew": 8, "device": device} | options)


def run(case: AttentionCase, form: str = "paged", **options: Any) -> Pair:
    """Run a prefill wrapper with the kernel for SM90; `options` go to `run`."""
    paged = form == "paged"
    make = (
        flashinfer_core.BatchPrefillWithPagedKVCacheWrapper
        if paged
        else flashinfer_core.BatchPrefillWithRaggedKVCacheWrapper
    )
    wrapper: Any = make(workspace(case.device), case.kv_layout, backend="fa3")
    getattr(case, f"plan_{form}")(wrapper)
    tensors = (case.q, case.cache) if paged else (case.q, *case.ragged)
    if case.sinks:
        options["sinks"] = case.sink_logits
    with poisoned_memory():
        return cast(Pair, wrapper.run(*tensors, return_lse=True, **options))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 8, 16, 24, 32, 64, 100, 128, 256])
def test_page_sizes(page_size: int, kv_layout: str, device: str) -> None:
    """Slots that no request owns hold NaN, also those at the end of a page in use."""
    case = bf16(device, page_size=page_size, kv_layout=kv_layout)
    case.compare(run(case))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype, causal: bool, device: str) -> None:
    case = bf16(device, head_dim_qk=dims[0], head_dim_vo=dims[1], dtype=dtype, causal=causal)
    expected = case.expected()
    case.compare(run(case), expected)
    case.compare(run(case, "ragged"), expected)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 16, 20])
def test_groups(group: int, device: str) -> None:
    case = bf16(device, num_qo_heads=2 * group)
    case.compare(run(case))


@pytest.mark.parametrize("kv_len", [1, 63, 64, 65, 127, 128, 129, 255, 257, 1023])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(kv_len: int, causal: bool, device: str) -> None:
    """One block or more, with or without an end that is not full; ragged requests begin anywhere."""
    case = bf16(device, ((33, kv_len), (65, kv_len + 3), (200, kv_len)), causal=causal, gap=8)
    expected = case.expected()
    case.compare(run(case), expected)
    case.compare(run(case, "ragged"), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"window_left": 0},
        {"window_left": 50},
        {"window_left": 200, "causal": False},
        {"window_left": 129, "page_size": 64},
        {"sinks": True},
        {"sinks": True, "window_left": 30},
        {"logits_soft_cap": 3.0},
        {"pos_encoding_mode": "ALIBI"},
        {"custom_mask": True},
        {"custom_mask": True, "window_left": 100, "logits_soft_cap": 5.0},
        {"sm_scale": -0.1},
        {"packed_kv": True},
        {"gap": 8, "packed_kv": True, "kv_layout": "HND"},
        {"plan_options": {"o_data_type": torch.float32}},
        {"plan_options": {"o_data_type": torch.float16}},
    ],
    ids=str,
)
def test_features(options: dict[str, Any], device: str) -> None:
    case = bf16(device, **options)
    case.compare(run(case))


@pytest.mark.parametrize("options", [{}, {"fixed_split_size": 3}, {"fixed_split_size": 64}, {"disable_split_kv": True}])
@pytest.mark.parametrize("window_left", [-1, 2500])
def test_splits(options: dict[str, Any], window_left: int, device: str) -> None:
    """Chunks that begin within blocks, and many of them."""
    lens = ((100, 9000), (20, 3000), (1, 10))
    case = bf16(device, lens, plan_options=options, window_left=window_left, sinks=True)
    case.compare(run(case))


def test_one_cache_for_all_requests(device: str) -> None:
    """K and V with a stride of 0, which a tensor map cannot have: the universal kernel runs, or "fa3" is refused."""
    case = bf16(device, ((100, 200), (70, 200)))
    k, v = (torch.randn(1, 200, 2, 128, device=device).bfloat16().expand(2, -1, -1, -1) for _ in "kv")
    table = [torch.tensor(t, dtype=torch.int32) for t in ([0, 1, 2], [0, 1], [200, 200])]
    for backend in ("auto", "fa3"):
        wrapper = flashinfer_core.BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend=backend)
        wrapper.plan(case.qo_indptr, *table, 8, 2, 128, 200, causal=True, q_data_type=torch.bfloat16)
        if backend == "fa3":
            with pytest.raises(
                NotImplementedError, match=r"^backend: expected a cache that is not empty, with strides"
            ):
                wrapper.run(case.q, (k, v))
            return
        actual = cast(Pair, wrapper.run(case.q, (k, v), return_lse=True))
        for rows in (slice(0, 100), slice(100, 170)):
            expected = reference.attention(case.q[rows].cpu(), k[0].cpu(), v[0].cpu(), causal=True)
            assert_attention_close((actual[0][rows], actual[1][rows]), expected, torch.bfloat16)


def test_scales(device: str) -> None:
    case = bf16(device)
    scaled = dataclasses.replace(case, sm_scale=0.5 * 0.25 * 128**-0.5)
    expected = scaled.expected()
    factors = {
        "q_scale": torch.tensor(0.5, device=device),
        "k_scale": 0.25,
        "v_scale": torch.tensor(2.0, device=device),
    }
    out, lse = run(case, **factors)
    assert_attention_close((out.float() / 2, lse), expected, torch.bfloat16)


def test_no_value_before_the_window_is_seen(device: str) -> None:
    """A box begins where a page or a part of one does, the window in the midst of it: NaN before it changes nothing."""
    case = bf16(device, ((20, 500),), window_left=70, num_qo_heads=16, num_kv_heads=1)
    expected = case.expected()
    for t in case.kv[0]:
        t[: 480 - 70] = math.nan
    case.compare(run(case), expected)


@pytest.mark.parametrize("page_size", [16, None])
def test_no_value_of_another_request_is_seen(page_size: int | None, device: str) -> None:
    """Keys past the end of a request are those of the next one: NaN there changes nothing."""
    case = bf16(device, ((90, 90), (200, 333), (64, 64)))
    for t in case.kv[1]:
        t.fill_(math.nan)
    out, lse = (t.cpu() for t in run(case, "paged" if page_size else "ragged"))
    expected = case.expected()
    for rows in (slice(0, 90), slice(290, 354)):
        assert_attention_close((out[rows], lse[rows]), (expected[0][rows], expected[1][rows]), case.dtype)
    assert out[90:290].isnan().all()


@pytest.mark.parametrize("page_size", [16, 1])
def test_repeats_are_bit_identical(page_size: int, device: str) -> None:
    case = bf16(device, ((300, 4000), (200, 700), (1000, 1000), (5, 9000)), page_size=page_size)
    first = run(case)
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(first, run(case), strict=True))


def test_auto_takes_it_where_it_applies(device: str) -> None:
    for options, expected in (
        ({}, "fa3"),
        ({"lens": ((1, 100), (1, 30)), "causal": False}, "fa2"),
        ({"head_dim_qk": 80}, "fa2"),
        ({"page_size": 8}, "fa3"),
        ({"page_size": 4}, "fa2"),
    ):
        case = bf16(device, **options)
        wrapper = flashinfer_core.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
        case.plan_paged(wrapper)
        assert wrapper.resolved_backend == expected
        case.compare(cast(Pair, wrapper.run(case.q, case.cache, return_lse=True)))


def test_both_kernels_run_one_plan(device: str) -> None:
    """Tensors whose rows do not begin at multiples of 16 bytes go to the universal kernel, with the same work list."""
    case = bf16(device, ((100, 9000), (500, 700)))
    odd = dataclasses.replace(case, skew=1)
    wrapper = flashinfer_core.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    case.plan_paged(wrapper)
    expected = case.expected()
    for same in (case, odd, case):
        case.compare(cast(Pair, wrapper.run(same.q, same.cache, return_lse=True)), expected)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"head_dim_qk": 80}, "head dims"),
        ({"kv_dtype": torch.float8_e4m3fn}, "a 16-bit KV cache"),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "no rotation"),
        ({"skew": 1}, "tensors whose rows"),
    ],
)
def test_refusals(options: dict[str, Any], said: str, device: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"^backend: expected {said}"):
        run(bf16(device, **options))
