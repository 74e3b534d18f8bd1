"""Merging of states, and cascade attention, against the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import meta, refused, transposed

import flashinfer_core
from flashinfer_core import reference
from flashinfer_core.testing import AttentionCase, assert_close, embed, workspace

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@st.composite
def states(draw: st.DrawFn, count: st.SearchStrategy[int]) -> tuple[torch.Tensor, torch.Tensor, int]:
    shape = (draw(st.integers(0, 9)), draw(count), draw(st.integers(1, 5)), draw(st.sampled_from([1, 3, 16, 64, 130])))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    v = torch.randn(shape, generator=generator).to(draw(st.sampled_from(DTYPES)))
    s = torch.randn(shape[:3], generator=generator) * draw(st.sampled_from([1.0, 30.0]))
    unseen = torch.rand(shape[:3], generator=generator) < 0.3
    s[unseen] = -math.inf
    v[unseen] = math.nan  # a state without keys is not read
    return v, s, draw(st.sampled_from([0, 3, 8]))


def placed(vs: tuple[torch.Tensor, torch.Tensor, int], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    v, s, gap = vs
    return embed(v.to(device), gap, gap).view, embed(s.to(device), gap, 1, (2, 0, 1) if gap else None).view


def check(actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert_close(actual[0], expected[0])
    assert_close(actual[1], expected[1])


@given(vs=states(st.integers(0, 6)))
def test_merge_states(vs: tuple[torch.Tensor, torch.Tensor, int], device: str) -> None:
    v, s = placed(vs, device)
    if v.shape[1] == 0:
        out, lse = flashinfer_core.merge_states(v, s)
        assert torch.all(out == 0)
        assert torch.all(lse == -math.inf)
    else:
        check(flashinfer_core.merge_states(v, s), reference.merge_states(v, s))


@given(vs=states(st.just(2)))
def test_merge_state(vs: tuple[torch.Tensor, torch.Tensor, int], device: str) -> None:
    v, s = placed(vs, device)
    expected = reference.merge_states(v, s)
    (v_a, v_b), (s_a, s_b) = v.unbind(1), s.unbind(1)
    check(flashinfer_core.merge_state(v_a, s_a, v_b, s_b), expected)
    flashinfer_core.merge_state_in_place(v_a, s_a, v_b, s_b)
    check((v_a, s_a), expected)


@given(vs=states(st.just(2)), bits=st.integers(0, 2**9 - 1))
def test_merge_in_place_with_mask(vs: tuple[torch.Tensor, torch.Tensor, int], bits: int, device: str) -> None:
    v, s = placed(vs, device)
    mask = torch.tensor([bits >> i & 1 for i in range(len(v))], dtype=torch.bool, device=device)
    expected = tuple(
        torch.where(mask.view(-1, *[1] * (merged.dim() - 1)), merged, kept.float())
        for merged, kept in zip(reference.merge_states(v, s), (v[:, 0], s[:, 0]), strict=True)
    )
    flashinfer_core.merge_state_in_place(v[:, 0], s[:, 0], v[:, 1], s[:, 1], mask)
    torch.testing.assert_close(v[:, 0].float(), expected[0], rtol=5e-3, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(s[:, 0], expected[1])


@pytest.mark.parametrize("num_states", [2, 9])
def test_merge_of_usual_sizes(num_states: int, device: str) -> None:
    v = torch.randn(70, num_states, 8, 128, device=device).bfloat16()
    s = torch.randn(70, num_states, 8, device=device)
    check(flashinfer_core.merge_states(v, s), reference.merge_states(v, s))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_cascade_equals_attention_over_the_joined_cache(levels: int, causal: bool) -> None:
    """Requests share the pages of the upper levels; joining each request's pages gives the expected result."""
    batch, qo, heads, size = 4, 3, (8, 2, 64), 8
    generator = torch.Generator().manual_seed(levels)
    lengths = [40, 24, 11][3 - levels :]  # keys of a piece on each level; only the last is not whole pages
    pieces = [1, 2, batch][3 - levels :]
    q = torch.randn(batch * qo, heads[0], heads[2], generator=generator)
    cache = torch.randn(200, 2, size, heads[1], heads[2], generator=generator)
    order = torch.randperm(200, generator=generator).int()
    tables: list[tuple[torch.Tensor, ...]] = []
    joined: list[list[int]] = [[] for _ in range(batch)]
    for length, count in zip(lengths, pieces, strict=True):
        pages = -(-length // size)
        indices, order = order[: pages * count], order[pages * count :]
        rows = batch * qo // count
        tables.append(
            (
                torch.arange(count + 1, dtype=torch.int32) * rows,
                torch.arange(count + 1, dtype=torch.int32) * pages,
                indices,
                torch.full((count,), (length - 1) % size + 1, dtype=torch.int32),
            )
        )
        for r in range(batch):
            piece = r * count // batch
            joined[r] += indices[piece * pages : (piece + 1) * pages].tolist()
    wrapper = flashinfer_core.MultiLevelCascadeAttentionWrapper(levels, workspace())
    wrapper.plan(*zip(*tables, strict=True), *heads, size, causal=causal, q_data_type=torch.float32)
    out = wrapper.run(q, cache)
    total = sum(lengths)
    for r in range(batch):
        k, v = (cache[joined[r], i].flatten(0, 1)[:total] for i in (0, 1))
        expected, _ = reference.attention(q[r * qo : (r + 1) * qo], k, v, causal=causal)
        torch.testing.assert_close(out[r * qo : (r + 1) * qo], expected, rtol=2e-5, atol=2e-5)


def test_two_levels_by_hand() -> None:
    """The shared-prefix recipe: prefill over the prefix, decode over the suffixes, merge."""
    suffixes = AttentionCase(((1, 20), (1, 5), (1, 0)), causal=False)
    prefix_k, prefix_v = torch.randn(100, 2, 64), torch.randn(100, 2, 64)
    shared = flashinfer_core.single_prefill_with_kv_cache(suffixes.q, prefix_k, prefix_v, return_lse=True)
    out, lse = flashinfer_core.merge_state(*shared, *suffixes.run_decode())
    for r, (k, v) in enumerate(suffixes.kv):
        joined = (torch.cat([prefix_k, k]), torch.cat([prefix_v, v]))
        expected_out, expected_lse = reference.attention(suffixes.q[r : r + 1], *joined)
        torch.testing.assert_close(out[r : r + 1], expected_out, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(lse[r : r + 1], expected_lse, rtol=2e-5, atol=2e-5)


V, S = torch.randn(3, 4, 8), torch.randn(3, 4)
MERGE = {"v_a": V, "s_a": S, "v_b": V.clone(), "s_b": S.clone()}


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("v_a", V[0], ValueError),
        ("v_a", V.int(), ValueError),
        ("v_a", transposed(V), ValueError),
        ("v_a", meta(V), NotImplementedError),
        ("s_a", S[:2], ValueError),
        ("s_a", S.half(), ValueError),
        ("v_b", V[:2], ValueError),
        ("v_b", V.half(), ValueError),
        ("s_b", S.T, ValueError),
        ("s_b", None, TypeError),
    ],
)
def test_merge_state_refuses(name: str, value: Any, error: type[Exception]) -> None:
    refused(flashinfer_core.merge_state, MERGE, {name: value}, error, name)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("v", torch.zeros(1, 1, 1).expand(3, 4, 8), ValueError),
        ("s", torch.zeros(1, 1).expand(3, 4), ValueError),
        ("v_other", V.bfloat16(), ValueError),
        ("s_other", S[None], ValueError),
        ("mask", torch.ones(2, dtype=torch.bool), ValueError),
        ("mask", torch.ones(3), ValueError),
    ],
)
def test_merge_in_place_refuses(name: str, value: Any, error: type[Exception]) -> None:
    good = {"v": V, "s": S, "v_other": V.clone(), "s_other": S.clone()}
    refused(flashinfer_core.merge_state_in_place, good, {name: value}, error, name)


@pytest.mark.parametrize(
    ("name", "value", "error"), [("v", V, ValueError), ("s", S, ValueError), ("s", torch.zeros(3, 2, 5), ValueError)]
)
def test_merge_states_refuses(name: str, value: Any, error: type[Exception]) -> None:
    good = {"v": torch.randn(3, 2, 4, 8), "s": torch.randn(3, 2, 4)}
    refused(flashinfer_core.merge_states, good, {name: value}, error, name)


def test_cascade_refuses() -> None:
    with pytest.raises(ValueError, match=r"^num_levels:"):
        flashinfer_core.MultiLevelCascadeAttentionWrapper(0, workspace())
    with pytest.raises(ValueError, match=r"^qo_indptr_buf_arr:"):
        flashinfer_core.MultiLevelCascadeAttentionWrapper(2, workspace(), use_cuda_graph=True)
    wrapper = flashinfer_core.MultiLevelCascadeAttentionWrapper(2, workspace())
    indptr, last = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    good = ([indptr, indptr], [indptr, indptr], [last, last], [last, last], 4, 2, 64, 16)
    wrapper.plan(*good)
    with pytest.raises(ValueError, match=r"^paged_kv_indptr_arr:"):
        wrapper.plan(good[0], [indptr], *good[2:])
    with pytest.raises(ValueError, match=r"^qo_indptr_arr:"):
        wrapper.plan([indptr, indptr * 2], *good[1:])
    with pytest.raises(NotImplementedError, match=r"^pos_encoding_mode, window_left:"):
        wrapper.plan(*good, window_left=3)
