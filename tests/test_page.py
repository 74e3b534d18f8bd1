from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import meta, refused, transposed

from flashinfer_core import page, reference
from flashinfer_core.testing import AppendCase, embed, poisoned

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def indices(device: str, *values: list[int]) -> list[torch.Tensor]:
    return [torch.tensor(x, device=device) for x in values]


@st.composite
def cases(draw: st.DrawFn) -> AppendCase:
    dims = st.one_of(st.integers(1, 40), st.sampled_from([16, 64, 128]))
    dim = draw(dims)
    fused = draw(st.booleans())
    return AppendCase(
        lens=tuple(draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=4))),
        page_size=draw(st.integers(1, 9)),
        heads=draw(st.integers(1, 4)),
        dims=(dim, dim if fused else draw(dims)),
        dtype=draw(st.sampled_from(FLOATS)),
        cache_dtype=draw(st.sampled_from([None, *FLOATS, *FP8])),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        kv_layout=draw(st.sampled_from(["NHD", "HND"])),
        fused=fused,
        slots=draw(st.booleans()),
        padding=draw(st.integers(0, 3)),
        gap=draw(st.sampled_from([0, 0, 3, 16])),
        skew=draw(st.sampled_from([1, 16])),
        seed=draw(st.integers(0, 2**31)),
    )


@given(case=cases())
def test_equals_reference(case: AppendCase, device: str) -> None:
    case.check(device)


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_usual_sizes(slots: bool, dtype: torch.dtype, device: str) -> None:
    AppendCase(((100, 1), (0, 300), (47, 1), (16, 0)), dtype=dtype, slots=slots).check(device)


@pytest.mark.parametrize("skew", [1, 16])
@pytest.mark.parametrize("scale_tensors", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("cache_dtype", FP8)
def test_fp8_cache_with_scales(
    cache_dtype: torch.dtype, dtype: torch.dtype, scale_tensors: bool, skew: int, device: str
) -> None:
    """The scales are chosen so that some values saturate and some become subnormal."""
    for scales in ((1.0, 1.0), (0.003, 500.0)):
        AppendCase(
            ((3, 1), (0, 30)), 4, 2, (64, 96), dtype, cache_dtype, slots=True, scales=scales,
            scale_tensors=scale_tensors, skew=skew,
        ).check(device)  # fmt: skip


@pytest.mark.parametrize("dtype", FP8)
def test_fp8_rounds_to_nearest_even_and_saturates(dtype: torch.dtype, device: str) -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).float()
    finite = every[every.isfinite()].unique()
    halfway = (finite[1:] + finite[:-1]) / 2
    beside = torch.cat([halfway.nextafter(torch.tensor(sign * 1e9)) for sign in (1, -1)])
    inf = float("inf")
    x = torch.cat([finite, halfway, beside, torch.tensor([inf, -inf, 1e9, -1e9, 464.1, 61441.0, 1e-9, -0.0])])
    cache = torch.zeros(2, 1, 1, 1, len(x), device=device).to(dtype)
    page.write_kv_slots(
        x.to(device)[None, None], x.to(device)[None, None], cache[0], cache[1], torch.tensor([0], device=device)
    )
    expected = reference.stored(x, dtype).view(torch.uint8)
    assert torch.equal(cache[0, 0, 0, 0].cpu().view(torch.uint8), expected)
    nan = torch.full((1, 1, len(x)), float("nan"), device=device)
    page.write_kv_slots(nan, -nan, cache[0], cache[1], torch.tensor([0], device=device))
    assert bool(cache.float().isnan().all())


def test_keys_and_values_of_different_dtypes(device: str) -> None:
    key, value = torch.randn(3, 2, 64, device=device), torch.randn(3, 2, 32, device=device)
    k_cache = torch.zeros(2, 4, 2, 64, dtype=torch.bfloat16, device=device)
    v_cache = torch.zeros(2, 4, 2, 32, device=device).to(torch.float8_e4m3fn)
    page.write_kv_slots(key, value, k_cache, v_cache, torch.tensor([7, 0, 2], device=device), v_scale=0.5)
    assert torch.equal(k_cache.view(8, 2, 64)[[7, 0, 2]], key.bfloat16())
    assert torch.equal(v_cache.view(8, 2, 32).float()[[7, 0, 2]], (value * 2).to(torch.float8_e4m3fn).float())


def test_fp8_is_not_converted(device: str) -> None:
    cache = torch.zeros(1, 4, 1, 8, device=device)
    key = torch.zeros(1, 1, 8, device=device).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"^key: expected dtype"):
        page.write_kv_slots(key, key, cache, cache.clone(), torch.tensor([0], device=device))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_append_into_strided_view(kv_layout: str, device: str) -> None:
    """flashinfer-ai/flashinfer#527: K and V as views of one tensor, only the right slots written."""
    cache = torch.zeros(4, 2, 3, 5, 16, device=device)
    key, value = torch.randn(2, 5, 16, device=device), torch.randn(2, 5, 16, device=device)
    if kv_layout == "HND":
        cache = cache.transpose(2, 3).contiguous()
    page.append_paged_kv_cache(
        key, value, *indices(device, [0, 1], [4, 0]), (cache[:, 0], cache[:, 1]),
        *indices(device, [2, 0, 3], [0, 2, 3], [2, 1]), kv_layout,
    )  # fmt: skip
    nhd = cache if kv_layout == "NHD" else cache.transpose(2, 3)
    assert torch.equal(nhd[0, :, 1], torch.stack([key[0], value[0]]))
    assert torch.equal(nhd[3, :, 0], torch.stack([key[1], value[1]]))
    assert int((cache != 0).sum()) == key.numel() + value.numel()


def test_batch_indices_in_any_order(device: str) -> None:
    """flashinfer-ai/flashinfer#616: requests may repeat, be missing or come in any order; -1 skips a token."""
    k_cache, v_cache = torch.zeros(4, 4, 1, 2, device=device), torch.zeros(4, 4, 1, 2, device=device)
    key = torch.arange(1.0, 7.0, device=device)[:, None, None].repeat(1, 1, 2)
    page.append_paged_kv_cache(
        key, -key, *indices(device, [2, 0, -1, 2, 0, 2], [1, 0, 99, 0, 3, 2]), (k_cache, v_cache),
        *indices(device, [3, 1, 0], [0, 1, 2, 3], [4, 4, 4]),
    )  # fmt: skip
    expected = torch.zeros(4, 4, device=device)
    expected[3, [0, 3]] = torch.tensor([2.0, 5.0], device=device)
    expected[0, [0, 1, 2]] = torch.tensor([4.0, 1.0, 6.0], device=device)
    assert torch.equal(k_cache[:, :, 0, 0], expected)
    assert torch.equal(v_cache, -k_cache)


def test_indices_of_any_stride(device: str) -> None:
    key = torch.randn(3, 1, 2, device=device)
    cache = torch.zeros(2, 4, 2, 1, 2, device=device)
    k_cache, v_cache = cache[:, :, 0], cache[:, :, 1]
    columns = torch.tensor([[0, 4, 1, 0, 2], [0, 5, 0, 2, 2], [0, 1, 7, 2, 7]], device=device).unbind(1)
    batch_indices, positions, pages, indptr, last = columns
    page.append_paged_kv_cache(key, key, batch_indices, positions, (k_cache, v_cache), pages, indptr[:2], last[:1])
    assert torch.equal(k_cache[[0, 0, 1], [0, 1, 1]], key)
    assert int((cache != 0).sum()) == 2 * key.numel()


def test_more_rows_than_slots(device: str) -> None:
    key = embed(torch.randn(5, 2, 8, device=device), gap=3).view
    k_cache, v_cache = torch.zeros(2, 4, 2, 8, device=device), torch.zeros(2, 4, 2, 8, device=device)
    page.write_kv_slots(key, key, k_cache, v_cache, torch.tensor([6, -1, 0], device=device))
    expected = torch.zeros(8, 2, 8, device=device)
    expected[[6, 0]] = key[[0, 2]]
    assert torch.equal(k_cache.view(8, 2, 8), expected)
    assert torch.equal(v_cache, k_cache)


def test_conversion_rounds_to_nearest_even(device: str) -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (512,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    bits = torch.where(bits.abs() < 1e-37, 0.0, bits)
    halfway = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 65519.0, 65520.0, 1e-7, float("nan")])
    x = torch.cat([bits, halfway]).to(device)[None, None]
    for dtype in (torch.float16, torch.bfloat16):
        cache = torch.zeros(2, 1, 1, 1, x.shape[-1], dtype=dtype, device=device)
        page.write_kv_slots(x, x, cache[0], cache[1], torch.tensor([0], device=device))
        assert torch.equal(cache[0, 0, 0, 0].nan_to_num(7.0), x[0, 0].to(dtype).nan_to_num(7.0))


def test_cache_past_2_to_31_elements(device: str) -> None:
    """Dao-AILab/flash-attention#772."""
    try:
        buffer = torch.empty(2**32 + 4096, dtype=torch.bfloat16, device=device)
    except RuntimeError:
        pytest.skip("not enough memory")
    cache = buffer.as_strided((2, 2, 4, 2, 8), (2**31 + 1024, 2**31, 16, 8, 1))
    cache.zero_()
    key, value = torch.randn(1, 2, 8).bfloat16().to(device), torch.randn(1, 2, 8).bfloat16().to(device)
    page.write_kv_slots(key, value, cache[:, 0], cache[:, 1], torch.tensor([6], device=device))
    assert torch.equal(cache[1, 0, 2], key[0])
    assert torch.equal(cache[1, 1, 2], value[0])


@given(
    lens=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6),
    padding=st.integers(0, 4),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    given_outputs=st.booleans(),
)
def test_batch_indices_positions(
    lens: list[tuple[int, int]], padding: int, dtype: torch.dtype, given_outputs: bool, device: str
) -> None:
    """flashinfer-ai/flashinfer#2004: the semantics of repeat_interleave, requests without tokens included."""
    indptr = torch.tensor([0, *(appended for _, appended in lens)]).cumsum(0).to(dtype)
    seq_lens = torch.tensor([sum(pair) for pair in lens], dtype=dtype)
    nnz = int(indptr[-1]) + padding
    outputs = [embed(poisoned((nnz,), torch.int32, device), offset=3) for _ in range(2)] if given_outputs else []
    actual = page.get_batch_indices_positions(
        indptr.to(device), seq_lens.to(device), nnz, *(embedded.view for embedded in outputs)
    )
    for got, want in zip(actual, reference.get_batch_indices_positions(indptr, seq_lens, nnz), strict=True):
        assert got.dtype == torch.int32
        assert torch.equal(got.cpu(), want)
    for embedded, got in zip(outputs, actual, strict=False):
        assert embedded.view is got
        embedded.assert_intact()


@given(lens=st.lists(st.integers(0, 40), max_size=6), page_size=st.integers(1, 9))
def test_seq_lens(lens: list[int], page_size: int, device: str) -> None:
    indptr = torch.tensor([0, *(-(-n // page_size) for n in lens)]).cumsum(0).int()
    last = torch.tensor([(n - 1) % page_size + 1 for n in lens], dtype=torch.int32)  # page_size for an empty request
    actual = page.get_seq_lens(indptr.to(device), last.to(device), page_size)
    assert actual.tolist() == lens
    assert torch.equal(reference.get_seq_lens(indptr, last, page_size), actual.cpu())


KEY = torch.randn(3, 2, 8)
K_CACHE, V_CACHE = torch.randn(4, 4, 2, 8), torch.randn(4, 4, 2, 8)
APPEND: dict[str, Any] = {
    "append_key": KEY,
    "append_value": KEY,
    "batch_indices": torch.tensor([0, 1, 1]),
    "positions": torch.tensor([0, 4, 5]),
    "paged_kv_cache": (K_CACHE, V_CACHE),
    "kv_indices": torch.tensor([2, 0, 3]),
    "kv_indptr": torch.tensor([0, 1, 3, 3]),
    "kv_last_page_len": torch.tensor([4, 2, 0]),
}
CACHE = "paged_kv_cache"


@pytest.mark.parametrize(
    ("bad", "error", "name"),
    [
        ({"append_key": 1}, TypeError, "append_key"),
        ({"append_key": torch.randn(2, 2, 8)}, ValueError, "append_key"),
        ({"append_key": torch.randn(3, 3, 8)}, ValueError, "append_key"),
        ({"append_key": transposed(KEY)}, ValueError, "append_key"),
        ({"append_key": KEY.long()}, ValueError, "append_key"),
        ({"append_key": KEY.to(torch.float8_e4m3fn)}, ValueError, "append_key"),
        ({"append_key": meta(KEY)}, NotImplementedError, "append_key"),
        ({"append_value": torch.randn(3, 2, 7)}, ValueError, "append_value"),
        ({"append_value": meta(KEY)}, NotImplementedError, "append_value"),
        ({"batch_indices": torch.tensor([0, 1, 3])}, ValueError, "batch_indices"),
        ({"batch_indices": torch.tensor([0, 1, -2])}, ValueError, "batch_indices"),
        ({"batch_indices": torch.tensor([0, 1, 2])}, ValueError, "batch_indices"),  # owns no pages
        ({"batch_indices": torch.tensor([0.0, 1.0, 1.0])}, ValueError, "batch_indices"),
        ({"batch_indices": meta(torch.tensor([0, 1, 1]))}, NotImplementedError, "batch_indices"),
        ({"positions": torch.tensor([0, 4, 6])}, ValueError, "positions"),
        ({"positions": torch.tensor([0, -1, 5])}, ValueError, "positions"),
        ({"positions": torch.tensor([0, 4, 2**40])}, ValueError, "positions"),
        ({"positions": torch.tensor([0, 4])}, ValueError, "positions"),
        ({"kv_indices": torch.tensor([2, 0, 4])}, ValueError, "kv_indices"),
        ({"kv_indices": torch.tensor([-1, 0, 3])}, ValueError, "kv_indices"),
        ({"kv_indices": torch.tensor([2, 0])}, ValueError, "kv_indptr"),
        ({"kv_indices": torch.tensor([[2, 0, 3]])}, ValueError, "kv_indices"),
        ({"kv_indptr": torch.tensor([0, 2, 1, 3])}, ValueError, "kv_indptr"),
        ({"kv_indptr": torch.tensor([-1, 1, 3, 3])}, ValueError, "kv_indptr"),
        ({"kv_indptr": torch.tensor([0, 1, 3, 4])}, ValueError, "kv_indptr"),
        ({"kv_indptr": torch.tensor([0, 1, 3])}, ValueError, "kv_indptr"),
        ({"kv_last_page_len": torch.tensor([4, 5, 0])}, ValueError, "kv_last_page_len"),
        ({"kv_last_page_len": torch.tensor([0, 2, 0])}, ValueError, "kv_last_page_len"),
        ({"kv_last_page_len": torch.tensor([4, 2])}, ValueError, "kv_indptr"),
        ({CACHE: (K_CACHE,)}, ValueError, CACHE),
        ({CACHE: (K_CACHE, None)}, TypeError, CACHE),
        ({CACHE: None}, TypeError, CACHE),
        ({CACHE: K_CACHE}, ValueError, CACHE),
        ({CACHE: torch.randn(4, 3, 4, 2, 8)}, ValueError, CACHE),
        ({CACHE: (K_CACHE, V_CACHE[:3])}, ValueError, CACHE),
        ({CACHE: (K_CACHE.long(), V_CACHE.long())}, ValueError, CACHE),
        ({CACHE: (transposed(K_CACHE), V_CACHE)}, ValueError, CACHE),
        ({CACHE: (K_CACHE[:1].expand(4, 4, 2, 8), V_CACHE)}, ValueError, CACHE),
        ({CACHE: (K_CACHE, meta(V_CACHE))}, NotImplementedError, CACHE),
        ({"kv_layout": "nhd"}, ValueError, "kv_layout"),
    ],
)
def test_append_refusals(bad: dict[str, Any], error: type[Exception], name: str) -> None:
    before = K_CACHE.clone(), V_CACHE.clone()
    refused(page.append_paged_kv_cache, APPEND, bad, error, name)
    assert torch.equal(K_CACHE, before[0])
    assert torch.equal(V_CACHE, before[1])


@pytest.mark.parametrize(
    ("bad", "error", "name"),
    [
        ({"k_scale": 2.0}, ValueError, "k_scale"),
        ({"v_scale": torch.ones(1)}, ValueError, "v_scale"),
        ({"slot_mapping": torch.tensor([0, 16, 3])}, ValueError, "slot_mapping"),
        ({"slot_mapping": torch.tensor([0, 2**40, 3])}, ValueError, "slot_mapping"),
        ({"slot_mapping": torch.tensor([0.0, 1.0, 3.0])}, ValueError, "slot_mapping"),
        ({"slot_mapping": torch.tensor([[0]])}, ValueError, "slot_mapping"),
        ({"slot_mapping": meta(torch.tensor([0]))}, NotImplementedError, "slot_mapping"),
        ({"slot_mapping": torch.arange(4)}, ValueError, "key"),
        ({"value": KEY[:2]}, ValueError, "value"),
        ({"key": torch.randn(3, 16)}, ValueError, "key"),
        ({"key": torch.randn(3, 1, 8)}, ValueError, "key"),
        ({"key": transposed(KEY)}, ValueError, "key"),
        ({"key": meta(KEY)}, NotImplementedError, "key"),
        ({"k_cache": torch.randn(16, 2, 8)}, ValueError, "k_cache"),
        ({"k_cache": K_CACHE.int()}, ValueError, "k_cache"),
        ({"v_cache": V_CACHE[:, :2]}, ValueError, "v_cache"),
        ({"v_cache": transposed(V_CACHE)}, ValueError, "v_cache"),
        ({"v_cache": V_CACHE[:1].expand(4, 4, 2, 8)}, ValueError, "v_cache"),
        ({"v_cache": meta(V_CACHE)}, NotImplementedError, "v_cache"),
    ],
)
def test_write_kv_slots_refusals(bad: dict[str, Any], error: type[Exception], name: str) -> None:
    good = {"key": KEY, "value": KEY, "k_cache": K_CACHE, "v_cache": V_CACHE, "slot_mapping": torch.arange(3)}
    refused(page.write_kv_slots, good, bad, error, name)


@pytest.mark.parametrize(
    ("bad", "error", "name"),
    [
        ({"k_scale": 0.0}, ValueError, "k_scale"),
        ({"k_scale": -1.0}, ValueError, "k_scale"),
        ({"v_scale": float("inf")}, ValueError, "v_scale"),
        ({"v_scale": float("nan")}, ValueError, "v_scale"),
        ({"k_scale": torch.ones(2)}, ValueError, "k_scale"),
        ({"k_scale": torch.ones(1).half()}, ValueError, "k_scale"),
        ({"v_scale": meta(torch.ones(1))}, NotImplementedError, "v_scale"),
        ({"k_scale": 2.0, "key": KEY.to(torch.float8_e4m3fn)}, ValueError, "k_scale"),
    ],
)
def test_scale_refusals(bad: dict[str, Any], error: type[Exception], name: str) -> None:
    caches = {"k_cache": K_CACHE.to(torch.float8_e4m3fn), "v_cache": V_CACHE.to(torch.float8_e4m3fn)}
    refused(
        lambda **arguments: page.write_kv_slots(**caches, **arguments),
        {"key": KEY, "value": KEY, "slot_mapping": torch.arange(3)}, bad, error, name,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "error", "name"),
    [
        ({"append_indptr": torch.tensor([0, 3, 2])}, ValueError, "append_indptr"),
        ({"append_indptr": torch.tensor([1, 2, 3])}, ValueError, "append_indptr"),
        ({"append_indptr": torch.tensor([0, 3])}, ValueError, "append_indptr"),
        ({"append_indptr": meta(torch.tensor([0, 1, 3]))}, NotImplementedError, "append_indptr"),
        ({"seq_lens": torch.tensor([5, 1])}, ValueError, "seq_lens"),
        ({"seq_lens": torch.tensor([5.0, 5.0])}, ValueError, "seq_lens"),
        ({"nnz": 2}, ValueError, "append_indptr"),
        ({"nnz": -1}, ValueError, "nnz"),
        ({"nnz": 3.0}, TypeError, "nnz"),
        ({"batch_indices": torch.zeros(3)}, ValueError, "batch_indices"),
        ({"batch_indices": torch.zeros(2, dtype=torch.int32)}, ValueError, "batch_indices"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, ValueError, "positions"),
    ],
)
def test_batch_indices_positions_refusals(bad: dict[str, Any], error: type[Exception], name: str) -> None:
    good = {"append_indptr": torch.tensor([0, 1, 3]), "seq_lens": torch.tensor([5, 5]), "nnz": 3}
    refused(page.get_batch_indices_positions, good, bad, error, name)


@pytest.mark.parametrize(
    ("bad", "error", "name"),
    [
        ({"kv_indptr": torch.tensor([0, 2, 1])}, ValueError, "kv_indptr"),
        ({"kv_indptr": torch.tensor([0, 2])}, ValueError, "kv_indptr"),
        ({"kv_indptr": meta(torch.tensor([0, 1, 3]))}, NotImplementedError, "kv_indptr"),
        ({"kv_last_page_len": torch.tensor([1, 5])}, ValueError, "kv_last_page_len"),
        ({"kv_last_page_len": torch.tensor([0, 1])}, ValueError, "kv_last_page_len"),
        ({"page_size": 0}, ValueError, "page_size"),
    ],
)
def test_seq_lens_refusals(bad: dict[str, Any], error: type[Exception], name: str) -> None:
    good = {"kv_indptr": torch.tensor([0, 1, 3]), "kv_last_page_len": torch.tensor([1, 4]), "page_size": 4}
    refused(page.get_seq_lens, good, bad, error, name)
