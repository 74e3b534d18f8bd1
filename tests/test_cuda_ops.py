"""The small operations on a GPU, beyond what every device has: no waiting, streams, CUDA graphs, indices that lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from op_calls import CALLS, Outputs

from flashinfer_core import _rope, activation, cascade, norm, page, quantization, reference, rope
from flashinfer_core.testing import assert_close, embed, no_waiting, poisoned

calls = pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)


@pytest.fixture(autouse=True)
def on_a_gpu(device: str) -> None:
    if not device.startswith("cuda"):
        pytest.skip("only GPUs have this")


def same(actual: Outputs, expected: Outputs) -> None:
    for got, want in zip(actual, expected, strict=True):
        assert torch.equal(got, want)


@calls
def test_nothing_waits_for_the_gpu(function: Callable[..., Outputs], device: str) -> None:
    function(*CALLS[function](device))  # the first time compiles
    arguments = CALLS[function](device)
    with no_waiting():
        function(*arguments)


def test_packing_of_segments_does_not_wait(device: str) -> None:
    x, indptr = torch.ones(40, dtype=torch.bool, device=device), torch.tensor([0, 3, 40], device=device)
    for _ in range(2):
        with no_waiting():
            packed, starts = quantization.pack_segments(x, indptr, little=True)
    assert starts.tolist() == [0, 1, 6]
    assert packed[:6].tolist() == [0b111, 0xFF, 0xFF, 0xFF, 0xFF, 0b11111]


@calls
def test_current_stream(function: Callable[..., Outputs], device: str) -> None:
    """flashinfer-ai/flashinfer#349.

    The arguments arrive late on a side stream, so that work on another stream would read the old ones.
    """
    fresh = CALLS[function](device)
    late = tuple(torch.zeros_like(t) for t in fresh)
    expected = function(*(t.clone() for t in fresh))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # tens of milliseconds
        for t, source in zip(late, fresh, strict=True):
            t.copy_(source)
        actual = function(*late)
    side.synchronize()
    same(actual, expected)


@calls
def test_captured_graph_replays_with_new_contents(function: Callable[..., Outputs], device: str) -> None:
    arguments = CALLS[function](device)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        function(*(t.clone() for t in arguments))
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = function(*arguments)
    for _ in range(2):
        fresh = CALLS[function](device)
        for t, source in zip(arguments, fresh, strict=True):
            t.copy_(source)
        graph.replay()
        same((*actual, *arguments), (*function(*fresh), *fresh))


def test_frequencies_first_used_in_a_capture(device: str) -> None:
    """A capture runs nothing, so nothing that it makes may be kept for later calls."""
    q, positions = torch.randn(5, 2, 16, device=device), torch.arange(5, device=device)
    rope.apply_rope_pos_ids(q, q, positions)
    _rope._frequencies.cache_clear()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        rope.apply_rope_pos_ids(q, q, positions, rope_theta=77.0)
    expected = reference.apply_rope(q, positions, reference.rope_frequencies(16, rope_theta=77.0))
    assert_close(rope.apply_rope_pos_ids(q, q, positions, rope_theta=77.0)[0], expected)


def test_programmatic_dependent_launch(device: str) -> None:
    """A chain in which every kernel may start before the one that it depends on ends."""
    weight = torch.randn(4096, device=device)
    x, residual = torch.randn(2000, 4096, device=device), torch.randn(2000, 4096, device=device)
    results = []
    for enable_pdl in (False, True):
        y, total, gate_up = x.clone(), residual.clone(), torch.ones(2000, 8192, device=device)
        for _ in range(20):
            norm.fused_add_rmsnorm(y, total, weight, enable_pdl=enable_pdl)
            norm.rmsnorm(y, weight, out=gate_up[:, :4096], enable_pdl=enable_pdl)
            activation.silu_and_mul(gate_up, out=y, enable_pdl=enable_pdl)
        results.append((y, total))
    same(*results)


def test_append_skips_what_does_not_exist(device: str) -> None:
    """Requests, positions, pages and index ranges outside of the tensors; only the first token is right."""
    cache = embed(poisoned((4, 2, 4, 2, 8), torch.float32, device), gap=3)
    before = cache.buffer.clone()
    big = 2**40
    batch_indices = torch.tensor([0, -1, -5, 3, big, 0, 0, 0, 1, 2, 0], device=device)
    positions = torch.tensor([5, 0, 0, 0, 0, -1, 6, big, 0, 0, 99], device=device)
    kv_indptr = torch.tensor([0, 2, 3, 9], device=device)  # request 2 ends past kv_indices
    kv_indices = torch.tensor([1, 3, 4, 0, -1], device=device)  # request 1 has page 4 of 4
    last = torch.tensor([2, 4, 4], device=device)
    key = torch.randn(len(positions), 2, 8, device=device)
    page.append_paged_kv_cache(key, -key, batch_indices, positions, cache.view, kv_indices, kv_indptr, last)
    assert torch.equal(cache.view[3, 0, 1], key[0])
    assert torch.equal(cache.view[3, 1, 1], -key[0])
    cache.view[3, :, 1] = poisoned((2, 2, 8), torch.float32, device)
    assert torch.equal(cache.buffer.view(torch.int32), before.view(torch.int32))


def test_write_kv_slots_skips_what_does_not_exist(device: str) -> None:
    cache = embed(poisoned((3, 4, 2, 8), torch.float32, device), gap=3)
    other = embed(poisoned((3, 4, 2, 8), torch.float32, device), gap=8)
    slots = torch.tensor([12, -1, 2**40, -(2**40), 11, 1 << 33], device=device)
    key = torch.randn(6, 2, 8, device=device)
    page.write_kv_slots(key, -key, cache.view, other.view, slots)
    for embedded, want in ((cache, key[4]), (other, -key[4])):
        assert torch.equal(embedded.view[2, 3], want)
        embedded.view[2, 3] = poisoned((2, 8), torch.float32, device)
        assert bool((embedded.view.contiguous().view(torch.int32) == -1).all())
        embedded.assert_intact()


def test_index_helpers_stay_inside(device: str) -> None:
    """Index tensors that decrease, exceed nnz or name too few tokens: any numbers may result, but no access outside."""
    indptr = torch.tensor([5, 9, 2, 2**40, 3], device=device)
    outputs = [embed(poisoned((7,), torch.int32, device), offset=3) for _ in range(2)]
    page.get_batch_indices_positions(indptr, torch.tensor([1, 0, -4, 2], device=device), 7, *(o.view for o in outputs))
    for output in outputs:
        output.assert_intact()
    batch_indices = outputs[0].view
    assert bool(((batch_indices >= -1) & (batch_indices < 4)).all())
    longer = page.get_batch_indices_positions(torch.tensor([0, 5], device=device), torch.tensor([9], device=device), 3)
    assert [t.tolist() for t in longer] == [[0, 0, 0], [4, 5, 6]]
    x = torch.ones(9, dtype=torch.bool, device=device)
    for bad in ([0, 2**40], [-8, 9], [5, 3, 1, 9], [0, 0, 0]):
        packed, _ = quantization.pack_segments(x, torch.tensor(bad, device=device), little=True)
        assert packed.device == x.device


@pytest.mark.parametrize("position", [-1, 9, 2**40])
def test_positions_outside_of_the_table_give_nan(position: int, device: str) -> None:
    q, k = torch.randn(3, 2, 32, device=device), torch.randn(3, 1, 32, device=device)
    table = reference.cos_sin_cache(9, reference.rope_frequencies(16)).to(device)
    positions = torch.tensor([4, position, 8], device=device)
    expected = rope.apply_rope_with_cos_sin_cache(positions.clamp(0, 8), q, k, 32, table)
    for got, want, x in zip(
        rope.apply_rope_with_cos_sin_cache(positions, q, k, 32, table), expected, (q, k), strict=True
    ):
        assert torch.equal(got[[0, 2]], want[[0, 2]])
        assert bool(got[1, :, :16].isnan().all())
        assert torch.equal(got[1, :, 16:], x[1, :, 16:])


def test_tokens_of_no_request_give_nan(device: str) -> None:
    q = torch.randn(6, 2, 16, device=device)
    indptr, offsets = torch.tensor([1, 3, 3, 5], device=device), torch.tensor([10, 0, 7], device=device)
    actual, _ = rope.apply_rope(q, q, indptr, offsets)
    expected, _ = rope.apply_rope_pos_ids(q, q, torch.tensor([0, 10, 11, 7, 8, 0], device=device))
    assert torch.equal(actual[1:5], expected[1:5])
    assert bool(actual[[0, 5]].isnan().all())


def test_limits_of_rope(device: str) -> None:
    wide = torch.zeros(1, 1, 20000, device=device)
    with pytest.raises(NotImplementedError, match=r"^rotary_dim: expected at most 1536 on a GPU, got 1538"):
        rope.apply_rope_pos_ids(wide, wide, torch.zeros(1, dtype=torch.int32, device=device), rotary_dim=1538)
    table = torch.zeros(1, 12290, device=device)
    with pytest.raises(NotImplementedError, match=r"^cos_sin_cache: expected a rotary_dim of at most 12288"):
        rope.apply_rope_with_cos_sin_cache(torch.zeros(1, dtype=torch.int32, device=device), wide, wide, 20000, table)
    table = torch.zeros(1, 12288, device=device)
    actual, _ = rope.apply_rope_with_cos_sin_cache(
        torch.zeros(1, dtype=torch.int32, device=device), wide + 1, wide, 20000, table
    )
    assert bool((actual[..., :12288] == 0).all())
    assert bool((actual[..., 12288:] == 1).all())


def test_merge_many_heads_in_place(device: str) -> None:
    """The log-sum-exps are overwritten while other threads of the head may still want the old ones."""
    v, s = torch.randn(2, 3000, 8, 250, device=device), torch.randn(2, 3000, 8, device=device) * 20
    expected = cascade.merge_state(v[0], s[0], v[1], s[1])
    cascade.merge_state_in_place(v[0], s[0], v[1], s[1])
    same((v[0], s[0]), expected)


def test_tensors_on_different_devices_are_refused(device: str) -> None:
    x, w, q = torch.randn(4, 8, device=device), torch.randn(8, device=device), torch.randn(4, 2, 8, device=device)
    positions, indptr = torch.arange(4, device=device), torch.tensor([0, 4], device=device)
    cache, slots = torch.zeros(2, 4, 2, 8, device=device), torch.arange(4, device=device)
    s, table = torch.randn(4, 2, device=device), torch.randn(9, 8, device=device)
    last, zeros = torch.tensor([4], device=device), torch.zeros(4, dtype=torch.int32, device=device)
    bad: list[tuple[str, Callable[[], object]]] = [
        ("weight", lambda: norm.rmsnorm(x, w.cpu())),
        ("weight", lambda: norm.rmsnorm(x.cpu(), w)),
        ("out", lambda: norm.rmsnorm(x, w, out=x.cpu())),
        ("residual", lambda: norm.fused_add_rmsnorm(x, x.cpu(), w)),
        ("beta", lambda: norm.layernorm(x, w, w.cpu())),
        ("out", lambda: activation.silu_and_mul(x, torch.zeros(4, 4))),
        ("k", lambda: rope.apply_rope_pos_ids(q, q.cpu(), positions)),
        ("pos_ids", lambda: rope.apply_rope_pos_ids(q, q, positions.cpu())),
        ("indptr", lambda: rope.apply_rope(q, q, indptr.cpu(), indptr[:1])),
        ("offsets", lambda: rope.apply_rope(q, q, indptr, indptr[:1].cpu())),
        ("cos_sin_cache", lambda: rope.apply_rope_with_cos_sin_cache(positions, q, q, 8, table.cpu())),
        ("key", lambda: rope.apply_rope_with_cos_sin_cache(positions, q, q.cpu(), 8, table)),
        ("positions", lambda: rope.apply_rope_with_cos_sin_cache(positions.cpu(), q, q, 8, table)),
        ("key", lambda: page.write_kv_slots(q.cpu(), q, cache, cache.clone(), slots)),
        ("k_cache", lambda: page.write_kv_slots(q, q, cache, cache.clone(), slots.cpu())),
        ("v_cache", lambda: page.write_kv_slots(q, q, cache, cache.cpu(), slots)),
        (
            "kv_indptr",
            lambda: page.append_paged_kv_cache(q, q, zeros, zeros, (cache, cache.clone()), last, indptr.cpu(), last),
        ),
        ("append_indptr", lambda: page.get_batch_indices_positions(indptr.cpu(), last, 4)),
        ("kv_indptr", lambda: page.get_seq_lens(indptr.cpu(), last, 4)),
        ("v_b", lambda: cascade.merge_state(q, s, q.cpu(), s)),
        ("s_a", lambda: cascade.merge_state(q, s.cpu(), q, s)),
        ("s", lambda: cascade.merge_states(q[:, None], s[:, None].cpu())),
        ("mask", lambda: cascade.merge_state_in_place(q, s, q * 2, s * 2, torch.ones(4, dtype=torch.bool))),
        ("indptr", lambda: quantization.segment_packbits(slots, indptr.cpu())),
    ]
    for name, call in bad:
        with pytest.raises(ValueError, match=rf"^{name}: expected a tensor on "):
            call()


def test_device_of_the_tensors_counts(device: str) -> None:
    """flashinfer-ai/flashinfer#452."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    x, w = torch.randn(4, 64, device="cuda:1"), torch.randn(64, device="cuda:1")
    with torch.cuda.device(0):
        actual = norm.rmsnorm(x, w)
    assert actual.device == x.device
    torch.testing.assert_close(actual, reference.rmsnorm(x, w))
