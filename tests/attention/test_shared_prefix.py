"""Batches that share a prefix, against attention over each request's joined keys."""

from __future__ import annotations

import pytest
import torch

import flashinfer_core
from flashinfer_core import reference
from flashinfer_core.testing import AttentionCase, assert_attention_close

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16
HEAD_ARGS = (HEADS, KV_HEADS, DIM, PAGE)


def dtypes(device: str) -> list[torch.dtype]:
    """What the device's attention kernels take."""
    return [torch.float32, torch.bfloat16] if device == "cpu" else [torch.float16, torch.bfloat16]


class Shared:
    """Requests and a prefix; `expected` is what attention over prefix and own keys gives."""

    def __init__(
        self, device: str, lens: tuple[tuple[int, int], ...], prefix: int, dtype: torch.dtype, layout: str = "NHD"
    ) -> None:
        self.case = AttentionCase(lens, HEADS, KV_HEADS, DIM, page_size=PAGE, dtype=dtype, kv_layout=layout)
        generator = torch.Generator().manual_seed(prefix)
        self.prefix = [torch.randn(prefix, KV_HEADS, DIM, generator=generator).to(dtype) for _ in "kv"]
        self.q = self.case.q.to(device)
        order = (0, 1) if layout == "NHD" else (1, 0)
        self.k, self.v = (t.to(device).permute(*order, 2) for t in self.prefix)
        k_cache, v_cache = self.case.cache
        self.cache = k_cache.to(device), v_cache.to(device)
        self.table = [t.to(device) for t in self.case.paged]
        self.qo_indptr = self.case.qo_indptr.to(device)

    def check(self, out: torch.Tensor, causal: bool, sm_scale: float | None = None) -> None:
        case = self.case
        for r, own in enumerate(case.kv):
            k, v = (torch.cat(pair) for pair in zip(self.prefix, own, strict=True))
            rows = slice(int(case.qo_indptr[r]), int(case.qo_indptr[r + 1]))
            expected = reference.attention(case.q[rows], k, v, causal=causal, sm_scale=sm_scale)
            assert_attention_close((out[rows].cpu(), expected[1]), expected, case.dtype)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("prefix", [1, 100, 700])
def test_decode(device: str, prefix: int, layout: str) -> None:
    for dtype in dtypes(device):
        s = Shared(device, ((1, 20), (1, 1), (1, 0), (1, 300)), prefix, dtype, layout)
        w = flashinfer_core.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(kv_layout=layout)
        w.begin_forward(*s.table, *HEAD_ARGS, data_type=dtype)
        out = w.forward(s.q, s.k, s.v, s.cache)
        assert out.dtype == dtype
        s.check(out, causal=False)
        w.end_forward()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True])
def test_prefill(device: str, causal: bool, layout: str) -> None:
    """Causal holds among a request's own keys: the prefix precedes them all."""
    for dtype in dtypes(device):
        s = Shared(device, ((5, 40), (17, 17), (0, 3), (1, 9), (130, 200)), 77, dtype, layout)
        w = flashinfer_core.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(kv_layout=layout)
        w.begin_forward(s.qo_indptr, *s.table, *HEAD_ARGS)
        s.check(w.forward(s.q, s.k, s.v, s.cache, causal=causal), causal)
        s.check(w.forward(s.q, s.k, s.v, s.cache, causal=causal, sm_scale=0.3), causal, 0.3)


def test_one_plan_serves_layers_and_prefixes(device: str) -> None:
    dtype = dtypes(device)[0]
    w = flashinfer_core.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(
        torch.empty(1 << 16, dtype=torch.uint8, device=device)
    )
    s = Shared(device, ((1, 20), (1, 33)), 50, dtype)
    w.begin_forward(*s.table, *HEAD_ARGS, data_type=dtype)
    for prefix in (50, 50, 9, 0):
        s = Shared(device, ((1, 20), (1, 33)), prefix, dtype)
        s.check(w.forward(s.q, s.k, s.v, s.cache), causal=False)
    other = Shared(device, ((1, 3), (1, 4), (1, 5)), 9, dtype)
    w.begin_forward(*other.table, *HEAD_ARGS, data_type=dtype)
    other.check(w.forward(other.q, other.k, other.v, other.cache), causal=False)
    w.reset_workspace_buffer(torch.empty(8, dtype=torch.uint8, device=device), torch.empty(8, device=device))


def test_page_table_in_host_memory(device: str) -> None:
    dtype = dtypes(device)[0]
    s = Shared(device, ((3, 20), (1, 33)), 50, dtype)
    w = flashinfer_core.BatchPrefillWithSharedPrefixPagedKVCacheWrapper()
    w.begin_forward(s.case.qo_indptr, *s.case.paged, *HEAD_ARGS)
    s.check(w.forward(s.q, s.k, s.v, s.cache, causal=True), causal=True)


def test_refusals() -> None:
    s = Shared("cpu", ((1, 20), (1, 33)), 50, torch.float32)
    decode = flashinfer_core.BatchDecodeWithSharedPrefixPagedKVCacheWrapper()
    with pytest.raises(RuntimeError, match=r"begin_forward\(\) first"):
        decode.forward(s.q, s.k, s.v, s.cache)
    decode.begin_forward(*s.table, *HEAD_ARGS)
    with pytest.raises(ValueError, match=r"^q: expected dtype torch.float16"):
        decode.forward(s.q, s.k, s.v, s.cache)
    decode.begin_forward(*s.table, *HEAD_ARGS, data_type="float32")
    with pytest.raises(ValueError, match=r"^q: expected 2 tokens"):
        decode.forward(s.q[:1], s.k, s.v, s.cache)
    decode.forward(s.q, s.k, s.v, s.cache)
    with pytest.raises(ValueError, match=r"^k_shared: expected 3 dimensions"):
        decode.forward(s.q, s.k[0], s.v, s.cache)
    with pytest.raises(ValueError, match=r"^k and v: expected"):
        decode.forward(s.q, s.k, s.v[:, :1], s.cache)
    with pytest.raises(ValueError, match=r"^kv_layout: expected one of"):
        flashinfer_core.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(kv_layout="HDN")
    prefill = flashinfer_core.BatchPrefillWithSharedPrefixPagedKVCacheWrapper()
    prefill.begin_forward(s.qo_indptr, *s.table, *HEAD_ARGS)
    with pytest.raises(NotImplementedError, match=r"^rope_theta=5.0 is not supported"):
        prefill.forward(s.q, s.k, s.v, s.cache, rope_theta=5.0)
