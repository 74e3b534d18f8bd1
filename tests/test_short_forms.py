"""The short call forms, each run as it is first met, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer_core
from flashinfer_core import reference
from flashinfer_core.testing import AttentionCase, assert_attention_close, assert_close

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 16
LENS = (30, 7, 48)
Pair = tuple[torch.Tensor, torch.Tensor]


def dtype_of(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.float16  # what the device's attention kernels take


def case_of(device: str, lens: tuple[tuple[int, int], ...], causal: bool = False) -> AttentionCase:
    return AttentionCase(lens, HEADS, KV_HEADS, DIM, page_size=PAGE, dtype=dtype_of(device), causal=causal)


class Batch:
    """Decode requests and their cache in every form, on a device."""

    def __init__(self, device: str, lens: tuple[int, ...] = LENS) -> None:
        self.case = case_of(device, tuple((1, kv) for kv in lens))
        self.q = self.case.q.to(device)
        k, v = self.case.cache
        self.cache = torch.stack([k, v], dim=1).to(device)  # [pages, 2, page, heads, dim]
        self.pages = {
            "kv_indptr": self.case.paged.indptr.to(device),
            "kv_indices": self.case.paged.indices.to(device),
            "kv_last_page_len": self.case.paged.last_page_len.to(device),
        }
        each = [torch.stack(kv, dim=1) for kv in self.case.kv]  # [tokens, 2, heads, dim]
        self.ragged = torch.cat(each).to(device)
        self.kv_indptr = self.case.kv_indptr.to(device)
        self.padded = torch.full((len(lens), max(lens), 2, KV_HEADS, DIM), torch.nan, dtype=self.ragged.dtype)
        for row, kv in zip(self.padded, each, strict=True):
            row[: len(kv)] = kv
        self.padded = self.padded.to(device)
        self.kv_lens = torch.tensor(lens, device=device)
        counts = self.case.paged.indptr.diff().tolist()
        table = [self.case.paged.indices[i : i + n] for i, n in zip(self.case.paged.indptr, counts, strict=False)]
        self.page_indices = torch.nn.utils.rnn.pad_sequence(table, batch_first=True, padding_value=-1).to(device)

    @property
    def hnd(self) -> torch.Tensor:
        return self.cache.transpose(2, 3)

    def check(self, result: Any) -> None:
        check(result, self.case)


def check(result: Any, case: AttentionCase) -> None:
    expected = case.expected()
    if isinstance(result, torch.Tensor):
        assert_attention_close((result.cpu(), expected[1]), expected, case.dtype)
    else:
        assert_attention_close((result[0].cpu(), result[1].cpu()), expected, case.dtype)


@pytest.mark.parametrize("lse", [False, True])
def test_single_decode_paged(device: str, lse: bool) -> None:
    b = Batch(device, LENS[:1])
    out = flashinfer_core.single_decode_with_kv_cache(q=b.q[0], kv_data=b.hnd, **b.pages, return_lse=lse)
    b.check((out[0][None], out[1][None]) if lse else out[None])


def test_single_decode_alone(device: str) -> None:
    b = Batch(device, LENS[:1])
    out = flashinfer_core.single_decode_with_kv_cache(q=b.q[0], kv_data=b.ragged, window_left=-1)
    b.check(out[None])
    full = Batch(device, (32,))
    in_order = full.hnd[full.pages["kv_indices"].long()].contiguous()
    full.check(flashinfer_core.single_decode_with_kv_cache(full.q[0], kv_data=in_order)[None])
    nhd = flashinfer_core.single_decode_with_kv_cache(q=full.q[0], kv_data=in_order.transpose(2, 3), kv_layout="NHD")
    full.check(nhd[None])


def test_batch_decode(device: str) -> None:
    b = Batch(device)
    decode = flashinfer_core.batch_decode_with_kv_cache
    b.check(decode(q=b.q, kv_data=b.hnd, **b.pages, return_lse=True))
    b.check(decode(q=b.q, kv_data=b.cache, **b.pages, kv_layout="NHD"))
    b.check(decode(q=b.q, kv_data=b.hnd, page_indices=b.page_indices, kv_lens=b.kv_lens, return_lse=True))
    b.check(decode(q=b.q, kv_data=b.padded, kv_lens=b.kv_lens, return_lse=True))
    b.check(decode(q=b.q, kv_data=b.ragged, kv_indptr=b.kv_indptr, return_lse=True))
    full = Batch(device, (32, 32))
    full.check(decode(q=full.q, kv_data=full.padded))
    full.check(decode(q=full.q, kv_data=full.hnd, page_indices=full.page_indices.tolist()))


def test_batch_decode_options(device: str) -> None:
    case = AttentionCase(((1, 30), (1, 7)), window_left=9, sm_scale=0.3, sinks=True, causal=False)
    case = AttentionCase(**{**vars(case), "dtype": dtype_of(device)})
    kv = torch.nn.utils.rnn.pad_sequence([torch.stack(kv, dim=1) for kv in case.kv], batch_first=True)
    assert case.sink_logits is not None
    out = flashinfer_core.batch_decode_with_kv_cache(
        case.q.to(device),
        kv.to(device),
        kv_lens=[30, 7],
        window_left=9,
        sm_scale=0.15,
        q_scale=2.0,
        sinks=case.sink_logits.to(device),
        return_lse=True,
    )
    check(out, case)


def test_cudnn_batch_decode(device: str) -> None:
    b = Batch(device)
    qo_indptr = torch.arange(len(LENS) + 1, device=device)
    decode = flashinfer_core.cudnn_batch_decode_with_kv_cache
    b.check(decode(q=b.q, kv_data=b.ragged, qo_indptr=qo_indptr, kv_indptr=b.kv_indptr))
    out = decode(
        b.q,
        b.hnd[:, 0],
        b.hnd[:, 1],
        DIM**-0.5,
        torch.empty(0, dtype=torch.uint8, device=device),
        max_sequence_kv=max(LENS),
        actual_seq_lens_kv=b.kv_lens.int().view(-1, 1, 1, 1),
        block_tables=b.page_indices,
        return_lse=True,
    )
    b.check(out)


@pytest.mark.parametrize("form", [{"causal": True}, {"append_mode": True}, {"append_mode": True, "causal": True}, {}])
def test_single_prefill(device: str, form: dict[str, bool]) -> None:
    """The queries are the last tokens of the cache."""
    case = case_of(device, ((9, 30),), causal=bool(form))
    kv = torch.stack(case.kv[0], dim=1).to(device)
    prefill = flashinfer_core.single_prefill_with_kv_cache
    check(prefill(q=case.q.to(device), kv_data=kv, **form, return_lse=True), case)
    k, v = case.cache
    pages = torch.stack([k, v], dim=1).transpose(2, 3).to(device)
    table = dict(zip(("kv_indptr", "kv_indices", "kv_last_page_len"), (t.to(device) for t in case.paged), strict=True))
    check(prefill(q=case.q.to(device), kv_data=pages, **table, **form, return_lse=True), case)


def test_decode_wrapper_with_the_cache_at_forward(device: str) -> None:
    b = Batch(device)
    w = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper()
    w.begin_forward(**b.pages)
    for _ in range(2):  # the layers
        b.check(w.forward(b.q, b.cache))
    b.check(w.forward_return_lse(b.q, kv_cache=b.cache))
    w.end_forward()


def test_decode_wrapper_with_the_cache_at_begin_forward(device: str) -> None:
    b = Batch(device)
    w = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper(kv_layout="HND")
    w.begin_forward(*b.pages.values(), kv_cache=b.hnd)
    b.check(w.forward(b.q))
    w.end_forward()
    with pytest.raises(TypeError, match=r"^paged_kv_cache: expected a cache"):
        w.forward(b.q)


def test_decode_wrapper_with_head_counts(device: str) -> None:
    b = Batch(device)
    w = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper()
    w.begin_forward(*b.pages.values(), HEADS, KV_HEADS, DIM, PAGE, data_type=dtype_of(device))
    b.check(w.forward(b.q, b.cache))
    w.begin_forward(*b.pages.values(), HEADS, KV_HEADS, DIM, PAGE, kv_cache=b.cache)
    b.check(w.run(b.q, b.cache, return_lse=True))
    b.check(w.forward(b.q))


def test_page_table_in_host_memory(device: str) -> None:
    b = Batch(device)
    w = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper()  # learns its device from the tensors
    w.plan(*b.case.paged, HEADS, KV_HEADS, DIM, PAGE, q_data_type=b.q.dtype)
    b.check(w.run(b.q, b.cache, return_lse=True))
    table = b.page_indices.cpu()
    w.plan(*b.case.paged, HEADS, KV_HEADS, DIM, PAGE, block_tables=table, seq_lens=b.kv_lens.cpu().int())
    b.check(w.run(b.q, b.cache, return_lse=True))
    b.check(flashinfer_core.batch_decode_with_kv_cache(q=b.q, kv_data=b.padded, kv_lens=list(LENS)))


def test_page_indices_as_a_table(device: str) -> None:
    b = Batch(device)
    w = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper()
    w.begin_forward(page_indices=b.page_indices, kv_lens=b.kv_lens)
    b.check(w.forward(b.q, b.cache))
    cache = torch.randn(6, 2, PAGE, KV_HEADS, DIM).to(b.q)
    w.begin_forward(page_indices=[[0, 1, 2], [3, 4, 5]])
    out = w.forward(b.q[:2], cache)
    for r in range(2):
        k, v = cache[3 * r : 3 * r + 3].cpu().transpose(0, 1).flatten(1, 2)
        expected = reference.attention(b.q[r : r + 1].cpu(), k, v)
        assert_attention_close((out[r : r + 1].cpu(), expected[1]), expected, b.case.dtype)


def test_ragged_wrapper(device: str) -> None:
    case = case_of(device, ((9, 30), (2, 7)), causal=True)
    q, kv = case.q.to(device), torch.cat([torch.stack(kv, dim=1) for kv in case.kv]).to(device)
    w = flashinfer_core.BatchPrefillWithRaggedKVCacheWrapper()
    w.begin_forward(qo_indptr=case.qo_indptr.to(device), kv_indptr=case.kv_indptr.to(device))
    check(w.forward(q, kv, causal=True), case)
    check(w.forward_return_lse(q, (kv[:, 0], kv[:, 1]), causal=True), case)
    check(w.forward(q, kv[:, 0], kv[:, 1], causal=True), case)
    check(w.forward(q, kv_data=kv, causal=True), case)
    w.end_forward()
    hnd = flashinfer_core.BatchPrefillWithRaggedKVCacheWrapper(kv_layout="HND")
    hnd.begin_forward(qo_indptr=case.qo_indptr.tolist(), kv_indptr=case.kv_indptr.tolist(), causal=True)
    check(hnd.forward(q, kv), case)


def test_paged_prefill_wrapper(device: str) -> None:
    case = case_of(device, ((9, 30), (2, 7)), causal=True)
    k, v = case.cache
    q, cache = case.q.to(device), (k.to(device), v.to(device))
    indptr, indices, last = (t.to(device) for t in case.paged)
    w = flashinfer_core.BatchPrefillWithPagedKVCacheWrapper()
    w.begin_forward(
        qo_indptr=case.qo_indptr.to(device), kv_indptr=indptr, kv_indices=indices, kv_last_page_len=last, causal=True
    )
    check(w.forward(q, cache), case)
    w.begin_forward(qo_indptr=case.qo_indptr.to(device), page_indices=[[0, 1], [2, 3]], kv_lens=[30, 7], kv_cache=cache)
    in_order = tuple(t[indices.long()] for t in cache)
    check(w.forward(q, in_order, causal=True), case_of(device, ((9, 30), (2, 7)), causal=True))
    w.end_forward()


def test_merge_attention_states(device: str) -> None:
    """The two-level recipe equals attention over the joined cache."""
    suffixes = Batch(device)
    shared = torch.randn(100, 2, KV_HEADS, DIM).to(suffixes.q)
    a = flashinfer_core.single_prefill_with_kv_cache(q=suffixes.q, kv_data=shared, return_lse=True)
    b = flashinfer_core.batch_decode_with_kv_cache(
        q=suffixes.q, kv_data=suffixes.padded, kv_lens=suffixes.kv_lens, return_lse=True
    )
    merged = [t.cpu() for t in flashinfer_core.merge_attention_states(a, b)]
    prefix_k, prefix_v = shared.cpu().unbind(1)
    for r, (k, v) in enumerate(suffixes.case.kv):
        q = suffixes.q[r : r + 1].cpu()
        expected = reference.attention(q, torch.cat([prefix_k, k]), torch.cat([prefix_v, v]))
        assert_attention_close((merged[0][r : r + 1], merged[1][r : r + 1]), expected, suffixes.case.dtype)


def test_merge_of_single_decodes(device: str) -> None:
    b = Batch(device, (30,))
    halves = [
        flashinfer_core.single_decode_with_kv_cache(q=b.q[0], kv_data=part, return_lse=True)
        for part in (b.ragged[:11], b.ragged[11:])
    ]
    out, lse = flashinfer_core.merge_attention_states(*halves)
    b.check((out[None], lse[None]))
    with pytest.raises(TypeError, match=r"^b: expected \(output, lse\), as with return_lse=True"):
        flashinfer_core.merge_attention_states(halves[0], halves[1][0])


def test_rope(device: str) -> None:
    q, k = torch.randn(9, HEADS, DIM), torch.randn(9, KV_HEADS, DIM)
    indptr, offsets = torch.tensor([0, 4, 9]), torch.tensor([3, 0])
    positions = torch.tensor([3, 4, 5, 6, 0, 1, 2, 3, 4])
    frequencies = reference.rope_frequencies(32)
    expected = [reference.apply_rope(x, positions, frequencies) for x in (q, k)]
    a, b = q.to(device), k.to(device)
    rotated = flashinfer_core.apply_rope_pos_ids(q=a, k=b, pos_ids=positions.to(device), rotary_dim=32)
    for out, want in zip(rotated, expected, strict=True):
        torch.testing.assert_close(out.cpu(), want, rtol=1e-4, atol=1e-5)
    flashinfer_core.apply_rope_inplace(q=a, k=b, indptr=indptr.to(device), offsets=offsets.to(device), rotary_dim=32)
    for out, want in zip((a, b), expected, strict=True):
        torch.testing.assert_close(out.cpu(), want, rtol=1e-4, atol=1e-5)


def test_norms(device: str) -> None:
    x, residual, weight = torch.randn(3, 40), torch.randn(3, 40), torch.randn(40)
    a, b, w = x.to(device), residual.to(device), weight.to(device)
    total = x + residual
    assert_close(flashinfer_core.rmsnorm(input=a, weight=w, eps=1e-6).cpu(), reference.rmsnorm(x, weight, 1e-6))
    flashinfer_core.fused_add_rmsnorm(input=a, residual=b, weight=w, eps=1e-6)
    assert_close(b.cpu(), total)
    assert_close(a.cpu(), reference.rmsnorm(total, weight, 1e-6))


def test_a_class_that_holds_a_wrapper(device: str) -> None:
    b = Batch(device)

    class Attention:
        def __init__(self) -> None:
            self.wrapper = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper()
            self.wrapper.begin_forward(**b.pages)

        def forward(self, query: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
            out = self.wrapper.forward(query, kv_cache)
            assert isinstance(out, torch.Tensor)
            return out

    b.check(Attention().forward(b.q, b.cache))


def test_a_model_that_plans_once_and_runs_each_layer(device: str) -> None:
    b = Batch(device)
    caches = [b.cache, b.cache * 2]
    w = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper()
    w.plan(*b.pages.values(), HEADS, KV_HEADS, DIM, PAGE, q_data_type=b.q.dtype)
    outs = [w.run(b.q, cache) for cache in caches]
    b.check(outs[0])
    for r, (k, v) in enumerate(b.case.kv):
        expected = reference.attention(b.q[r : r + 1].cpu(), 2 * k, 2 * v)
        assert_attention_close((outs[1][r : r + 1].cpu(), expected[1]), expected, b.case.dtype)


def test_attributes() -> None:
    assert flashinfer_core.bench.__name__ == "flashinfer_core.bench"
    lengths = torch.tensor([3, 0, 2], dtype=torch.int32)
    assert flashinfer_core.utils.get_indptr(lengths).tolist() == [0, 3, 3, 5]
    torch.testing.assert_close(flashinfer_core.utils.get_alibi_slopes(12), reference.alibi_slopes(12))
