"""Bad arguments of the attention functions: each is refused by name, and nothing reads out of bounds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from refusals import meta, transposed

import flashinfer_core
from flashinfer_core.testing import AttentionCase, workspace

CASE = AttentionCase(((3, 30), (2, 7)), num_qo_heads=4, num_kv_heads=2, head_dim_qk=64, page_size=16)


# On a GPU, which has no float32 kernel, each dtype stands for the one before it: what is wrong stays wrong.
ON_GPU = {torch.float32: torch.float16, torch.float16: torch.bfloat16}


def on(device: str, value: Any) -> Any:
    """Return a value, or all in a dictionary or tuple, for a device. Index arrays stay in host memory."""
    if device == "cpu":
        return value
    if isinstance(value, dict):
        return {name: on(device, item) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(on(device, item) for item in value)
    if isinstance(value, torch.dtype):
        return ON_GPU.get(value, value)
    if not isinstance(value, torch.Tensor) or value.dtype in (torch.int32, torch.int64):
        return value
    if value.is_meta:
        return value.to(on(device, value.dtype))
    there = torch.empty_strided(value.shape, value.stride(), dtype=on(device, value.dtype), device=device)
    return there if 0 in value.stride() else there.copy_(value)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


PLAN: dict[str, Any] = {
    "num_qo_heads": 4,
    "num_kv_heads": 2,
    "page_size": 16,
    "q_data_type": torch.float32,
}
PREFILL = PLAN | {
    "qo_indptr": CASE.qo_indptr,
    "paged_kv_indptr": CASE.paged.indptr,
    "paged_kv_indices": CASE.paged.indices,
    "paged_kv_last_page_len": CASE.paged.last_page_len,
    "head_dim_qk": 64,
}
DECODE = PLAN | {
    "indptr": CASE.paged.indptr,
    "indices": CASE.paged.indices,
    "last_page_len": CASE.paged.last_page_len,
    "head_dim": 64,
}
RAGGED = {
    "qo_indptr": CASE.qo_indptr,
    "kv_indptr": CASE.kv_indptr,
    "num_qo_heads": 4,
    "num_kv_heads": 2,
    "head_dim_qk": 64,
    "q_data_type": torch.float32,
}
WRAPPERS = {
    "prefill": (flashinfer_core.BatchPrefillWithPagedKVCacheWrapper, PREFILL),
    "decode": (flashinfer_core.BatchDecodeWithPagedKVCacheWrapper, DECODE),
    "ragged": (flashinfer_core.BatchPrefillWithRaggedKVCacheWrapper, RAGGED),
}

COMMON_BAD = [
    ("num_qo_heads", 3, ValueError),
    ("num_qo_heads", 0, ValueError),
    ("num_qo_heads", 4.0, TypeError),
    ("num_kv_heads", 0, ValueError),
    ("pos_encoding_mode", "rope", ValueError),
    ("window_left", -2, ValueError),
    ("logits_soft_cap", -1.0, ValueError),
    ("logits_soft_cap", float("nan"), ValueError),
    ("sm_scale", float("inf"), ValueError),
    ("rope_scale", 0.0, ValueError),
    ("q_data_type", "float17", ValueError),
    ("q_data_type", torch.float8_e4m3fn, NotImplementedError),
    ("kv_data_type", torch.float8_e4m3fn, NotImplementedError),
    ("o_data_type", torch.int8, NotImplementedError),
    ("fixed_split_size", 0, ValueError),
    ("seq_lens", ints(30, 8), ValueError),
]
PLAN_BAD = {
    "decode": [
        ("head_dim", 0, ValueError, "head_dim_qk"),
        ("head_dim", 512, ValueError, "head_dim_qk"),  # flashinfer-ai/flashinfer#3297: beyond this version
        ("page_size", 0, ValueError),
        ("indptr", ints(0, 2), ValueError, "last_page_len"),
        ("indptr", ints(1, 2, 3), ValueError),
        ("indptr", ints(0, 3, 2), ValueError),
        ("indptr", ints(0, 2, 9), ValueError),
        ("indptr", ints(0, 2, 3, dtype=torch.int64), ValueError),
        ("indptr", meta(CASE.paged.indptr), NotImplementedError),
        ("indptr", [0, 2, 3], TypeError),
        ("indices", ints(0, -1, 2), ValueError),
        ("indices", transposed(CASE.paged.indices), ValueError),
        ("last_page_len", ints(17, 7), ValueError),
        ("last_page_len", ints(0, 7), ValueError),
        ("last_page_len", ints(14), ValueError),
        ("q_len_per_req", 0, ValueError),
    ],
    "prefill": [
        ("head_dim_vo", 257, ValueError),
        ("qo_indptr", ints(0, 5, 3), ValueError),
        ("qo_indptr", ints(-1, 3, 5), ValueError),
        ("qo_indptr", ints(), ValueError),
        ("qo_indptr", CASE.qo_indptr.float(), ValueError),
        ("paged_kv_indptr", ints(0, 2, 9), ValueError),
        ("paged_kv_indices", ints(0, 1, -5), ValueError),
        ("paged_kv_last_page_len", ints(14, 0), ValueError),
        ("custom_mask", torch.ones(7, dtype=torch.bool), ValueError),
        ("custom_mask", torch.ones(3 * 30 + 2 * 7), ValueError),
        ("packed_custom_mask", torch.ones(2, dtype=torch.uint8), ValueError),
        ("seq_lens_q", ints(3, 3), ValueError),
        ("max_token_per_sequence", 2, ValueError),
        ("max_sequence_kv", 29, ValueError),
        ("uniform_q_len", 3, ValueError),
        ("prefix_len_ptr", ints(0, 0), NotImplementedError),
        ("token_pos_in_items_ptr", ints(0, 0), NotImplementedError),
        ("token_pos_in_items_len", 3, NotImplementedError),
        ("max_item_len_ptr", ints(0, 0), NotImplementedError),
        ("use_token_head_sf", True, NotImplementedError),
    ],
    "ragged": [
        ("kv_indptr", ints(0, 30, 20), ValueError),
        ("kv_indptr", ints(2, 30, 37), ValueError),
        ("kv_indptr", ints(0, 37), ValueError),
        ("v_indptr", ints(0, 30, 37), NotImplementedError),
        ("o_indptr", ints(0, 3, 5), NotImplementedError),
        ("uniform_q_len", 2, ValueError),
    ],
}


@pytest.mark.parametrize(
    ("kind", "name", "value", "error", "said"),
    [(kind, *bad, bad[0]) for kind in WRAPPERS for bad in COMMON_BAD]
    + [(kind, *bad[:3], bad[3] if len(bad) > 3 else bad[0]) for kind, bads in PLAN_BAD.items() for bad in bads],
)
def test_plan(kind: str, name: str, value: Any, error: type[Exception], said: str, device: str) -> None:
    if device != "cpu" and (name, value) == ("kv_data_type", torch.float8_e4m3fn):
        pytest.skip("a GPU reads FP8 caches")
    wrapper, good = WRAPPERS[kind]
    wrapper(workspace(device)).plan(**on(device, good))
    with pytest.raises(error, match=rf"^{said}(:|=)"):
        wrapper(workspace(device)).plan(**on(device, good | {name: value}))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("float_workspace_buffer", 1024, TypeError),
        ("kv_layout", "DHN", ValueError),
        ("backend", "cudnn", ValueError),
        ("backend", "fa3", NotImplementedError),
        ("jit_args", ["x"], NotImplementedError),
        ("jit_kwargs", {"x": 1}, NotImplementedError),
    ],
)
@pytest.mark.parametrize("kind", WRAPPERS)
def test_construction(kind: str, name: str, value: Any, error: type[Exception], device: str) -> None:
    if device != "cpu" and (name, value) == ("backend", "fa3"):
        pytest.skip("a GPU's kernel")
    with pytest.raises(error, match=rf"^{name}(:|=)"):
        WRAPPERS[kind][0](**{"float_workspace_buffer": workspace(device), name: value})


@pytest.mark.parametrize("kind", WRAPPERS)
def test_backends(kind: str, device: str) -> None:
    make = WRAPPERS[kind][0]
    if device == "cpu":
        with pytest.raises(NotImplementedError, match=r"^backend="):
            make(workspace(), backend="fa2")
    else:
        make(workspace(device), backend="fa2").plan(**on(device, WRAPPERS[kind][1]))
    if kind != "ragged":
        assert make(workspace(device)).resolved_backend == ("cpu" if device == "cpu" else "auto")


K, V = CASE.cache
RUN_BAD = [
    ("q", CASE.q[:-1], ValueError),
    ("q", CASE.q[:, :3], ValueError),
    ("q", CASE.q[..., :-1], ValueError),
    ("q", CASE.q.half(), ValueError),
    ("q", transposed(CASE.q), ValueError),
    ("q", meta(CASE.q), NotImplementedError),
    ("q", CASE.q[0], ValueError),
    ("q", CASE.q[0, 0, 0], ValueError),
    ("q", None, TypeError),
    ("paged_kv_cache", (K, V, V), ValueError),
    ("paged_kv_cache", K, ValueError),
    ("paged_kv_cache", None, TypeError),
    ("paged_kv_cache", (K.half(), V.half()), ValueError),
    ("paged_kv_cache", (K, V.half()), ValueError),
    ("paged_kv_cache", (K[:, :8], V[:, :8]), ValueError),
    ("paged_kv_cache", (K[:, :, :1], V[:, :, :1]), ValueError),
    ("paged_kv_cache", (transposed(K), V), ValueError),
    ("paged_kv_cache", (K, V[:2]), ValueError),
    ("paged_kv_cache", (K[:2], V[:2]), ValueError),
    ("q_scale", torch.ones(4), NotImplementedError),
    ("k_scale", float("nan"), ValueError),
    ("v_scale", "1", ValueError),
    ("out", torch.empty(5, 4, 63), ValueError),
    ("out", torch.empty(5, 4, 64, dtype=torch.float16), ValueError),
    ("out", torch.empty(1, 1, 1).expand(5, 4, 64), ValueError),
    ("lse", torch.empty(5, 3), ValueError),
    ("lse", torch.empty(5, 4, dtype=torch.float16), ValueError),
    ("sinks", torch.empty(3), ValueError),
    ("sinks", torch.empty(4, dtype=torch.bfloat16), ValueError),
    ("kv_cache_sf", K, NotImplementedError),
    ("skip_softmax_threshold_scale_factor", 1.0, NotImplementedError),
    ("window_left", -2, ValueError),
]
PREFILL_RUN_BAD = [
    ("lse_base", "e", ValueError),
    ("lse_layout", "NHD", ValueError),
    ("use_fp16_softmax", True, NotImplementedError),
    ("uses_spcompress", True, NotImplementedError),
]


@pytest.mark.parametrize(
    ("kind", "name", "value", "error"),
    [(kind, *bad) for kind in ("prefill", "decode") for bad in RUN_BAD]
    + [("prefill", *bad) for bad in PREFILL_RUN_BAD],
)
def test_run(kind: str, name: str, value: Any, error: type[Exception], device: str) -> None:
    make, plan = WRAPPERS[kind]
    wrapper = make(workspace(device))
    q, cache = on(device, CASE.q if kind == "prefill" else CASE.q[:2]), on(device, CASE.cache)
    with pytest.raises(RuntimeError, match="plan"):
        wrapper.run(q, cache)
    wrapper.plan(**on(device, plan))
    wrapper.run(q, cache)
    if kind == "decode" and isinstance(value, torch.Tensor) and name in ("q", "out", "lse") and value.dim() > 1:
        value = value[: len(value) - 3]
    if name not in ("lse", "sinks"):
        value = on(device, value)
    elif isinstance(value, torch.Tensor):
        value = value.to(device)
    with pytest.raises(error, match=rf"^{name}[^:=]*(:|=)"):
        wrapper.run(**{"q": q, "paged_kv_cache": cache, "return_lse": True, name: value})


SINGLE: dict[str, Any] = {"q": CASE.q[:3], "k": CASE.kv[0][0], "v": CASE.kv[0][1]}


@pytest.mark.parametrize(
    ("name", "value", "error", "said"),
    [
        ("q", CASE.q[0], ValueError, "q"),
        ("q", CASE.q.int(), ValueError, "q"),
        ("q", meta(CASE.q), NotImplementedError, "q"),
        ("q", transposed(CASE.q), ValueError, "q"),
        ("k", SINGLE["k"][0], ValueError, "k"),
        ("k", SINGLE["k"][..., :-1], ValueError, "k and v"),
        ("k", SINGLE["k"].half(), ValueError, "k and v"),
        ("v", SINGLE["v"][:-1], ValueError, "v"),
        ("v", SINGLE["v"].double(), ValueError, "v"),
        ("kv_layout", "HDN", ValueError, "kv_layout"),
        ("custom_mask", torch.ones(3, 29, dtype=torch.bool), ValueError, "custom_mask"),
        ("scale_q", torch.ones(4), NotImplementedError, "scale_q"),
        ("scale_k", torch.ones(2), NotImplementedError, "scale_k"),
        ("scale_v", torch.ones(2), NotImplementedError, "scale_v"),
        ("kv_cache_sf", torch.ones(2), NotImplementedError, "kv_cache_sf"),
        ("o_dtype", "int8", NotImplementedError, "o_dtype"),
        ("backend", "trtllm", ValueError, "backend"),
        ("backend", "fa2", NotImplementedError, "backend"),
    ],
)
def test_single(name: str, value: Any, error: type[Exception], said: str, device: str) -> None:
    if device != "cpu" and (name, value) == ("backend", "fa2"):
        pytest.skip("a GPU's kernel")
    with pytest.raises(error, match=rf"^{said}(:|=)"):
        flashinfer_core.single_prefill_with_kv_cache(**on(device, SINGLE | {name: value}))


def test_threads_may_run_one_plan_on_tensors_of_different_layouts(device: str) -> None:
    make, plan = WRAPPERS["prefill"]
    wrapper = make(workspace(device))
    wrapper.plan(**on(device, plan))
    q, cache = on(device, CASE.q), on(device, CASE.cache)
    caches = [cache, tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in cache)]
    expected = wrapper.run(q, cache)
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda i: wrapper.run(q, caches[i % 2]), range(2000)):
            assert torch.equal(result, expected)
