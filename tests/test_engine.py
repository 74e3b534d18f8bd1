"""The core that the adapters of all engines share: layers, groups of them, and their plans."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from engine_cases import KINDS, MIXED, Arrays, assert_right, attend, case_of, group_of, layer_of

from flashinfer_core.page import write_kv_slots


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("q_len", [1.0, None])
def test_layer(kind: str, q_len: float | None, device: str) -> None:
    """Any `q_len` gives the right result."""
    case = case_of(MIXED, device, **KINDS[kind])
    if case.kv_layout == "HND":
        cache = tuple(t.transpose(1, 2) for t in case.cache)
        case.__dict__["cache"] = cache
    layer = layer_of(case)
    assert_right(case, attend(case, group_of(case, [layer]), layer, q_len=q_len))


def test_layers_of_one_plan(device: str) -> None:
    windowed = case_of(MIXED, device, window_left=33)
    plain = dataclasses.replace(windowed, window_left=-1)
    layers = [layer_of(windowed), layer_of(plain, sm_scale=0.3)]
    group = group_of(plain, layers)
    assert group.window_left == -1
    assert_right(windowed, attend(windowed, group, layers[0]))
    assert_right(plain, attend(plain, group, layers[1]), dataclasses.replace(plain, sm_scale=0.3).expected()[0])


def test_ragged(device: str) -> None:
    case = case_of(((40, 40), (1, 1), (300, 300)), device, causal=False)
    layer = layer_of(case)
    plan = group_of(case, [layer]).plan_ragged(case.qo_indptr.to(device), causal=False)
    out = torch.empty_like(case.q)
    layer.run(plan, case.q, *case.ragged, out)
    assert_right(case, out)


def test_rows_of_a_table(device: str) -> None:
    case = case_of(MIXED, device)
    layer, arrays = layer_of(case), Arrays.of(case)
    rows = torch.tensor([2, 0, 5, 3], dtype=torch.int32, device=device)
    table = torch.full((7, arrays.table.shape[1]), 10**6, dtype=torch.int32, device=device)
    table[rows.long()] = arrays.table
    plan = group_of(case, [layer]).plan_paged(
        arrays.qo_indptr, arrays.kv_lens, table, page_size=case.page_size, causal=True, rows=rows
    )
    out = torch.empty_like(case.q)
    layer.run(plan, case.q, *case.cache, out)
    assert_right(case, out)


def test_sinks_of_others_are_not_written_to(device: str) -> None:
    case = case_of(MIXED, device, sinks=True)
    layer = layer_of(case)
    layer.sinks = mine = torch.ones(case.num_qo_heads, device=device)
    layer.place(mine.device)
    layer.sinks = torch.zeros(case.num_qo_heads, dtype=torch.bfloat16, device=device)
    layer.place(mine.device)
    assert mine.tolist() == [1.0] * case.num_qo_heads


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sinks_that_are_loaded_later(dtype: torch.dtype, device: str) -> None:
    case = case_of(MIXED, device, sinks=True)
    sinks = torch.zeros(case.num_qo_heads, dtype=dtype, device=device)
    layer = layer_of(case, sinks=sinks)
    group = group_of(case, [layer])
    attend(case, group, layer)
    assert case.sink_logits is not None
    sinks.copy_(case.sink_logits)
    case.sink_logits.copy_(sinks)  # rounded
    layer.place(sinks.device)
    assert_right(case, attend(case, group, layer))


def test_writes(device: str) -> None:
    """A call like the last one is not checked anew, every other one is."""
    case = case_of(MIXED, device)
    layer, (k, v) = layer_of(case), (torch.zeros_like(t) for t in case.cache)
    other_k, other_v = torch.zeros_like(k), torch.zeros_like(v)
    keys, values = (torch.randn(3, 6, *t.shape[2:], dtype=case.dtype, device=device) for t in (k, v))
    slots = torch.tensor([[3, 40, -1, 7], [100, 3, 5, 90], [-1, -1, 0, 1]], device=device)
    for one in zip(keys, values, slots, strict=True):
        layer.write(*one[:2], k, v, one[2])
        write_kv_slots(*one[:2], other_k, other_v, one[2])
    assert torch.equal(k, other_k)
    assert torch.equal(v, other_v)
    assert k.count_nonzero() > 0
    for wrong in (
        (keys[0, :3], values[0, :3], k, v, slots[0]),
        (keys[0], values[0], k, v, slots[0].float()),
        (keys[0], values[0, :, :1], k, v, slots[0]),
        (keys[0], values[0], k, v[:, :8], slots[0]),
    ):
        with pytest.raises(ValueError, match="expected"):
            layer.write(*wrong)
    with pytest.raises(ValueError, match="k_scale: expected None or 1"):
        layer.write(keys[0], values[0], k, v, slots[0], k_scale=2.0)


@pytest.mark.parametrize("prefix", [64, 256])
@pytest.mark.parametrize("sinks", [False, True])
def test_cascade(prefix: int, sinks: bool, device: str) -> None:
    lens = tuple((qo, prefix + own) for qo, own in ((1, 1), (7, 30), (1, 100)))
    case = case_of(lens, device, sinks=sinks)
    pages = prefix // case.page_size
    for keys, values in case.kv[1:]:
        keys[:prefix], values[:prefix] = case.kv[0][0][:prefix], case.kv[0][1][:prefix]
    arrays, layer = Arrays.of(case), layer_of(case)
    arrays.table[1:, :pages] = arrays.table[0, :pages]
    plan = group_of(case, [layer]).plan_cascade(
        *arrays.as_tuple(), page_size=case.page_size, num_rows=len(case.q), prefix_len=prefix, q_len=3
    )
    for _ in range(2):  # two layers
        out = torch.full_like(case.q, torch.nan)
        layer.run(plan, case.q, *case.cache, out)
        assert_right(case, out)


def test_refusals_of_plans(device: str) -> None:
    case = case_of(MIXED, device)
    windowed = layer_of(case, window_left=3)
    with pytest.raises(NotImplementedError, match="a sliding window or ALiBi in attention that is not causal"):
        attend(dataclasses.replace(case, causal=False), group_of(case, [windowed]), windowed)
    arrays = Arrays.of(case)
    for group, prefix, words in (
        (group_of(case, [windowed]), 16, "expected layers without windows"),
        (group_of(case, [layer_of(case)], batch_invariant=True), 16, "may depend on the batch"),
        (group_of(case, [layer_of(case)]), 8, "prefix_len: expected a multiple of page_size 16, got 8"),
    ):
        with pytest.raises((NotImplementedError, ValueError), match=words):
            group.plan_cascade(*arrays.as_tuple(), page_size=16, num_rows=47, prefix_len=prefix)
    with pytest.raises(NotImplementedError, match="batch_invariant: expected layers without a sliding window"):
        group_of(case, [windowed], batch_invariant=True)
    with pytest.raises(ValueError, match="layers: expected one pair"):
        group_of(case, [layer_of(case), layer_of(case, num_qo_heads=4)])


@pytest.mark.parametrize("dim", [64, 128])
def test_batch_invariance(dim: int, device: str) -> None:
    """A request alone and in a batch: the same bits."""
    case = case_of(MIXED, device, dim=dim)
    layer = layer_of(case)
    group = group_of(case, [layer], batch_invariant=True, max_requests=4)
    arrays = Arrays.of(case)
    together = attend(case, group, layer, arrays, q_len=1.0)
    assert_right(case, together)
    for r, (qo, _) in enumerate(case.lens):
        begin = int(case.qo_indptr[r])
        indptr = torch.tensor([0, qo], dtype=torch.int32, device=device)
        plan = group.plan_paged(
            indptr, arrays.kv_lens[r : r + 1], arrays.table[r : r + 1], page_size=case.page_size, causal=True
        )
        alone = torch.empty_like(case.q[begin : begin + qo])
        layer.run(plan, case.q[begin : begin + qo], *case.cache, alone)
        assert torch.equal(alone, together[begin : begin + qo])
