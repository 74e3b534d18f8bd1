from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import meta, refused, transposed

from flashinfer_core import reference, rope
from flashinfer_core.testing import RopeCase, assert_close

INDEX_DTYPES = (torch.int32, torch.int64)


@st.composite
def cases(draw: st.DrawFn) -> RopeCase:
    form = draw(st.sampled_from(["indptr", "pos_ids", "cache"]))
    head_dim = draw(st.one_of(st.integers(1, 40).map(lambda i: 2 * i), st.sampled_from([16, 64, 128, 192, 256])))
    rotary_dims = [None, st.integers(1, head_dim // 2).map(lambda i: 2 * i)]
    if head_dim >= 16:
        rotary_dims.append(st.integers(1, head_dim // 16).map(lambda i: 16 * i))
    rotary_dim = draw(st.sampled_from(rotary_dims))
    return RopeCase(
        form=form,
        lens=tuple(draw(st.lists(st.integers(0, 6), max_size=4))),
        heads=draw(st.tuples(st.integers(1, 4), st.integers(1, 3))),
        head_dim=head_dim,
        rotary_dim=None if rotary_dim is None else draw(rotary_dim),
        interleave=draw(st.booleans()),
        inplace=draw(st.booleans()),
        llama31=form != "cache" and draw(st.booleans()),
        rope_scale=draw(st.sampled_from([1.0, 2.5, 8.0])),
        rope_theta=draw(st.sampled_from([1e4, 5e5])),
        dtype=draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
        index_dtype=draw(st.sampled_from(INDEX_DTYPES)),
        gap=draw(st.sampled_from([0, 0, 3, 16])),
        seed=draw(st.integers(0, 2**31)),
    )


@given(case=cases())
def test_equals_reference(case: RopeCase, device: str) -> None:
    case.check(device)


@pytest.mark.parametrize("form", ["indptr", "pos_ids", "cache"])
@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_partial_rotary_dim(form: str, interleave: bool, inplace: bool, device: str) -> None:
    """flashinfer-ai/flashinfer#619."""
    RopeCase(form, (7, 0, 30), rotary_dim=64, interleave=interleave, inplace=inplace).check(device)


@pytest.mark.parametrize("interleave", [False, True])
def test_rotary_dim_of_several_blocks(interleave: bool, device: str) -> None:
    RopeCase("pos_ids", (3,), (2, 1), 1200, 1100, interleave, dtype=torch.float32).check(device)


def test_int32_and_int64_positions(device: str) -> None:
    """flashinfer-ai/flashinfer#1129: both dtypes of every index tensor give one result."""
    q, k = torch.randn(5, 4, 16, device=device), torch.randn(5, 2, 16, device=device)
    pos_ids = torch.tensor([3, 0, 70000, 9, 9], device=device)
    indptr, offsets = torch.tensor([0, 2, 5], device=device), torch.tensor([4, 11], device=device)
    table = reference.cos_sin_cache(70001, reference.rope_frequencies(16)).to(device)
    for call in (
        lambda dtype: rope.apply_rope_pos_ids(q, k, pos_ids.to(dtype)),
        lambda dtype: rope.apply_rope(q, k, indptr.to(dtype), offsets.to(dtype)),
        lambda dtype: rope.apply_rope_with_cos_sin_cache(pos_ids.to(dtype), q, k, 16, table),
    ):
        for first, second in zip(call(torch.int32), call(torch.int64), strict=True):
            assert torch.equal(first, second)


def test_forms_agree(device: str) -> None:
    q, k = torch.randn(5, 4, 16, device=device), torch.randn(5, 2, 16, device=device)
    indptr, offsets = torch.tensor([0, 2, 5], device=device), torch.tensor([4, 11], device=device)
    pos_ids = torch.tensor([4, 5, 11, 12, 13], device=device)
    by_indptr, by_pos_ids = rope.apply_rope(q, k, indptr, offsets), rope.apply_rope_pos_ids(q, k, pos_ids)
    assert all(torch.equal(a, b) for a, b in zip(by_indptr, by_pos_ids, strict=True))


def test_large_positions(device: str) -> None:
    q = torch.zeros(4, 1, 8, device=device)
    q[..., :4] = 1.0
    pos_ids = torch.tensor([2**17 + 1, 2**24 + 1, 2**30 + 12345, -(2**20)], device=device)
    actual, _ = rope.apply_rope_pos_ids(q, q, pos_ids)
    angles = (pos_ids.float()[:, None] * reference.rope_frequencies(8).to(device)).double()
    assert_close(actual[:, 0, :4], angles.cos().float())
    assert_close(actual[:, 0, 4:], angles.sin().float())


def test_strided_positions(device: str) -> None:
    q, k = torch.randn(3, 2, 8, device=device), torch.randn(3, 2, 8, device=device)
    pos_ids = torch.tensor([[5, 0], [6, 0], [9, 0]], device=device)[:, 0]
    expected = rope.apply_rope_pos_ids(q, k, pos_ids.contiguous())
    assert torch.equal(rope.apply_rope_pos_ids(q, k, pos_ids)[0], expected[0])


def test_views_of_a_fused_projection(device: str) -> None:
    """flashinfer-ai/flashinfer#311: q and k as slices of one qkv tensor, rotated in place."""
    qkv = torch.randn(6, (4 + 2 + 2) * 32, device=device)
    before = qkv.clone()
    q, k, v = qkv[:, :128], qkv[:, 128:192], qkv[:, 192:]
    positions = torch.arange(6, device=device)
    table = reference.cos_sin_cache(6, reference.rope_frequencies(32)).to(device)
    expected = rope.apply_rope_with_cos_sin_cache(positions, q.contiguous(), k.contiguous(), 32, table)
    rope.apply_rope_with_cos_sin_cache_inplace(positions, q, k, 32, table)
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])
    assert torch.equal(v, before[:, 192:])


def test_nan_stays_in_its_pair(device: str) -> None:
    q, k = torch.randn(1, 1, 8, device=device), torch.randn(1, 1, 8, device=device)
    q[0, 0, 1] = float("nan")
    actual, _ = rope.apply_rope_pos_ids(q, k, torch.tensor([3], device=device))
    assert actual[0, 0].isnan().nonzero().flatten().tolist() == [1, 5]


Q, K = torch.randn(5, 4, 16), torch.randn(5, 2, 16)
INDPTR, OFFSETS, POSITIONS = torch.tensor([0, 2, 5]), torch.tensor([4, 11]), torch.arange(5)
TABLE = torch.randn(9, 12)

HEADS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": None}, TypeError, "q"),
    ({"q": torch.randn(5, 64)}, ValueError, "q"),
    ({"q": Q.double()}, ValueError, "q"),
    ({"q": transposed(Q)}, ValueError, "q"),
    ({"q": meta(Q)}, NotImplementedError, "q"),
    ({"k": torch.randn(4, 2, 16)}, ValueError, "k"),
    ({"k": torch.randn(5, 2, 8)}, ValueError, "k"),
    ({"k": K.half()}, ValueError, "k"),
    ({"k": transposed(K)}, ValueError, "k"),
    ({"k": meta(K)}, NotImplementedError, "k"),
    ({"rotary_dim": 7}, ValueError, "rotary_dim"),
    ({"rotary_dim": 18}, ValueError, "rotary_dim"),
    ({"rotary_dim": -2}, ValueError, "rotary_dim"),
    ({"rotary_dim": 8.0}, TypeError, "rotary_dim"),
    ({"rope_scale": 0}, ValueError, "rope_scale"),
    ({"rope_theta": -1.0}, ValueError, "rope_theta"),
]
BY_POS_IDS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"pos_ids": torch.arange(4)}, ValueError, "pos_ids"),
    ({"pos_ids": torch.arange(5)[:, None]}, ValueError, "pos_ids"),
    ({"pos_ids": torch.arange(5).float()}, ValueError, "pos_ids"),
    ({"pos_ids": meta(POSITIONS)}, NotImplementedError, "pos_ids"),
]
BY_INDPTR: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"indptr": torch.tensor([0, 3, 2])}, ValueError, "indptr"),
    ({"indptr": torch.tensor([1, 2, 5])}, ValueError, "indptr"),
    ({"indptr": torch.tensor([0, 2, 6])}, ValueError, "indptr"),
    ({"indptr": torch.tensor([0, 2, 4])}, ValueError, "indptr"),
    ({"indptr": torch.tensor([0, 5])}, ValueError, "indptr"),
    ({"indptr": INDPTR.short()}, ValueError, "indptr"),
    ({"indptr": meta(INDPTR)}, NotImplementedError, "indptr"),
    ({"offsets": torch.tensor([1, 2, 3])}, ValueError, "indptr"),
    ({"offsets": OFFSETS.float()}, ValueError, "offsets"),
    ({"offsets": meta(OFFSETS)}, NotImplementedError, "offsets"),
]
LLAMA: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"high_freq_factor": 1.0}, ValueError, "high_freq_factor"),
    ({"low_freq_factor": 0.0}, ValueError, "high_freq_factor"),
    ({"old_context_len": 0}, ValueError, "old_context_len"),
]
EXPANDED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": torch.randn(1, 4, 16).expand(5, 4, 16)}, ValueError, "q"),
    ({"k": torch.randn(5, 1, 16).expand(5, 2, 16)}, ValueError, "k"),
]


@pytest.mark.parametrize(("bad", "error", "name"), HEADS + BY_POS_IDS)
def test_pos_ids_refusals(bad: dict[str, Any], error: type[Exception], name: str) -> None:
    good = {"q": Q, "k": K, "pos_ids": POSITIONS}
    refused(rope.apply_rope_pos_ids, good, bad, error, name)
    refused(rope.apply_llama31_rope_pos_ids_inplace, good, bad, error, name)


@pytest.mark.parametrize(("bad", "error", "name"), HEADS + BY_INDPTR)
def test_indptr_refusals(bad: dict[str, Any], error: type[Exception], name: str) -> None:
    good = {"q": Q, "k": K, "indptr": INDPTR, "offsets": OFFSETS}
    refused(rope.apply_rope, good, bad, error, name)
    refused(rope.apply_llama31_rope_inplace, good, bad, error, name)


@pytest.mark.parametrize(("bad", "error", "name"), LLAMA)
def test_llama31_refusals(bad: dict[str, Any], error: type[Exception], name: str) -> None:
    refused(rope.apply_llama31_rope_pos_ids, {"q": Q, "k": K, "pos_ids": POSITIONS}, bad, error, name)


@pytest.mark.parametrize(("bad", "error", "name"), EXPANDED)
def test_inplace_refusals(bad: dict[str, Any], error: type[Exception], name: str) -> None:
    refused(rope.apply_rope_pos_ids_inplace, {"q": Q, "k": K, "pos_ids": POSITIONS}, bad, error, name)
    rope.apply_rope_pos_ids(**{"q": Q, "k": K, "pos_ids": POSITIONS, **bad})


@pytest.mark.parametrize(
    ("bad", "error", "name"),
    [
        ({"cos_sin_cache": TABLE.bfloat16()}, ValueError, "cos_sin_cache"),  # flashinfer-ai/flashinfer#585
        ({"cos_sin_cache": TABLE.half()}, ValueError, "cos_sin_cache"),
        ({"cos_sin_cache": TABLE[:, :11]}, ValueError, "cos_sin_cache"),
        ({"cos_sin_cache": torch.randn(9, 18)}, ValueError, "cos_sin_cache"),
        ({"cos_sin_cache": torch.randn(9, 1, 12)}, ValueError, "cos_sin_cache"),
        ({"cos_sin_cache": transposed(TABLE)}, ValueError, "cos_sin_cache"),
        ({"cos_sin_cache": meta(TABLE)}, NotImplementedError, "cos_sin_cache"),
        ({"positions": torch.tensor([0, 1, 2, 3, 9])}, ValueError, "positions"),
        ({"positions": torch.tensor([0, -1, 2, 3, 4])}, ValueError, "positions"),
        ({"positions": torch.arange(6)}, ValueError, "positions"),
        ({"positions": torch.arange(5).float()}, ValueError, "positions"),
        ({"positions": meta(POSITIONS)}, NotImplementedError, "positions"),
        ({"head_size": 0}, ValueError, "head_size"),
        ({"head_size": 15}, ValueError, "query"),
        ({"head_size": "16"}, TypeError, "head_size"),
        ({"query": torch.randn(5, 70)}, ValueError, "query"),
        ({"query": Q.long()}, ValueError, "query"),
        ({"query": transposed(Q)}, ValueError, "query"),
        ({"query": meta(Q)}, NotImplementedError, "query"),
        ({"key": torch.randn(4, 32)}, ValueError, "key"),
        ({"key": torch.randn(5, 2, 14)}, ValueError, "key"),
        ({"key": K.half()}, ValueError, "key"),
        ({"key": transposed(K)}, ValueError, "key"),
    ],
)
def test_cache_refusals(bad: dict[str, Any], error: type[Exception], name: str) -> None:
    good = {"positions": POSITIONS, "query": Q, "key": K, "head_size": 16, "cos_sin_cache": TABLE}
    refused(rope.apply_rope_with_cos_sin_cache, good, bad, error, name)
    refused(rope.apply_rope_with_cos_sin_cache_inplace, good, bad, error, name)
