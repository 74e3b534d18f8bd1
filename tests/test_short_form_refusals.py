"""What is neither a short form nor a full one is refused, with a message that shows both."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer_core

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 16
Q, KV = torch.randn(2, HEADS, DIM), torch.randn(5, 2, KV_HEADS, DIM)
PAGES = torch.randn(3, 2, KV_HEADS, PAGE, DIM)
INDPTR = torch.tensor([0, 1], dtype=torch.int32)


@pytest.mark.parametrize(
    "call",
    [
        lambda: flashinfer_core.single_decode_with_kv_cache(Q[0], KV[:, 0], KV[:, 1], kv_data=KV),
        lambda: flashinfer_core.single_decode_with_kv_cache(q=Q[0], k=KV[:, 0], kv_data=KV),
        lambda: flashinfer_core.single_prefill_with_kv_cache(Q, KV[:, 0], kv_data=KV),
        lambda: flashinfer_core.single_prefill_with_kv_cache(Q, KV[:, 0], KV[:, 1], append_mode=True),
        lambda: flashinfer_core.cudnn_batch_decode_with_kv_cache(
            q=Q, k_cache=PAGES, kv_data=KV, qo_indptr=INDPTR, kv_indptr=INDPTR
        ),
    ],
)
def test_a_mix_of_both_forms_is_refused(call: Any) -> None:
    with pytest.raises(TypeError, match=r"^kv_data: expected \w+\(q, k\w*, v\w*,.*short form \w+\(q=, kv_data=, .*mix"):
        call()


@pytest.mark.parametrize(
    ("kv_data", "arrays"),
    [
        (KV, {"kv_lens": INDPTR}),
        (KV, {}),
        (PAGES, {"kv_indptr": INDPTR, "kv_indices": INDPTR}),
        (PAGES, {"kv_indptr": INDPTR, "kv_lens": INDPTR}),
        (PAGES, {"page_indices": INDPTR[None], "kv_last_page_len": INDPTR}),
        (PAGES[0], {"kv_lens": INDPTR}),
        (PAGES[0, 0], {"kv_indptr": INDPTR}),
    ],
)
def test_batch_decode_refuses_what_is_no_form(kv_data: torch.Tensor, arrays: dict[str, torch.Tensor]) -> None:
    with pytest.raises(TypeError, match=r"^kv_data: expected \[total, 2,.*\[batch, max_len, 2.*page_indices"):
        flashinfer_core.batch_decode_with_kv_cache(q=Q, kv_data=kv_data, **arrays)


def test_refusals_of_the_functions() -> None:
    decode, prefill = flashinfer_core.single_decode_with_kv_cache, flashinfer_core.single_prefill_with_kv_cache
    with pytest.raises(TypeError, match=r"^kv_data: expected \[tokens, 2, heads, dim\] alone"):
        decode(q=Q[0], kv_data=PAGES, kv_indptr=INDPTR)
    with pytest.raises(TypeError, match=r"^kv_data: expected \[tokens, 2, heads, dim\] alone"):
        prefill(q=Q, kv_data=KV, kv_indptr=INDPTR)
    with pytest.raises(TypeError, match=r"^kv_layout: expected nothing"):
        decode(q=Q[0], kv_data=KV, kv_layout="NHD")
    with pytest.raises(ValueError, match=r"^kv_data: expected shape \[\*, 2, \*, \*\]"):
        decode(q=Q[0], kv_data=KV.transpose(0, 1))
    with pytest.raises(ValueError, match=r"^kv_data: expected shape \[2, \*, 2, \*, \*\]"):
        flashinfer_core.batch_decode_with_kv_cache(q=Q, kv_data=PAGES)
    with pytest.raises(ValueError, match=r"^causal: expected True, or nothing"):
        prefill(q=Q, kv_data=KV, append_mode=True, causal=False)
    with pytest.raises(ValueError, match=r"^kv_indptr: expected 2 entries"):
        decode(q=Q[0], kv_data=PAGES, kv_indptr=[0, 1, 2], kv_indices=[0, 1], kv_last_page_len=[3, 3])


@pytest.mark.parametrize(
    "arguments",
    [
        {"kv_indptr": INDPTR, "indptr": INDPTR, "kv_indices": INDPTR, "kv_last_page_len": INDPTR},
        {"kv_indptr": INDPTR, "kv_indices": INDPTR},
        {"page_indices": [[0, 1]], "kv_indptr": INDPTR},
        {"page_indices": [[0, 1]], "block_tables": INDPTR[None]},
        {"kv_lens": INDPTR},
        {"nothing": 1},
    ],
)
def test_a_mix_of_both_forms_of_plan_is_refused(arguments: dict[str, Any]) -> None:
    wrapper: Any = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper()
    with pytest.raises(TypeError, match=r"^\w+: expected plan\(indptr, indices,.*short form plan\(kv_indptr=.*mix"):
        wrapper.begin_forward(**arguments)
    ragged: Any = flashinfer_core.BatchPrefillWithRaggedKVCacheWrapper()
    with pytest.raises(TypeError, match=r"^\w+: expected plan\(qo_indptr, kv_indptr,.*short form plan\(kv_indptr="):
        ragged.begin_forward(**arguments)


def test_refusals_of_the_wrappers() -> None:
    decode: Any = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper()
    with pytest.raises(RuntimeError, match=r"call plan\(\) first"):
        decode.forward(Q, PAGES)
    decode.begin_forward(page_indices=[0, 1])
    with pytest.raises(ValueError, match=r"^page_indices: expected 2 dimensions"):
        decode.forward(Q, PAGES)
    ragged: Any = flashinfer_core.BatchPrefillWithRaggedKVCacheWrapper()
    ragged.begin_forward(qo_indptr=[0, 2], kv_indptr=[0, 5])
    with pytest.raises(TypeError, match=r"^kv_data: expected forward\(q, k, v, ...\) or forward\(q, kv_data="):
        ragged.forward(Q, KV[:, 0], kv_data=KV)
    with pytest.raises(ValueError, match=r"^kv_data: expected shape"):
        ragged.forward(Q, KV[:, 0])


def test_refusals_of_cudnn_batch_decode() -> None:
    lens = torch.tensor([20, 3], dtype=torch.int32)
    good = {"q": Q, "k_cache": PAGES[:, 0], "v_cache": PAGES[:, 1], "scale": 1.0, "workspace_buffer": Q}
    good |= {"max_sequence_kv": 20, "actual_seq_lens_kv": lens, "block_tables": torch.tensor([[0, 1], [2, -1]]).int()}
    flashinfer_core.cudnn_batch_decode_with_kv_cache(**good)
    for name, value, error in (
        ("max_sequence_kv", 19, ValueError),
        ("block_tables", None, TypeError),
        ("actual_seq_lens_kv", None, TypeError),
        ("batch_offsets_k", lens, NotImplementedError),
    ):
        with pytest.raises(error, match=rf"^{name}[:=]"):
            flashinfer_core.cudnn_batch_decode_with_kv_cache(**{**good, name: value})
