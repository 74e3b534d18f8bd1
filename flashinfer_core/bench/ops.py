"""Norm, rope, cache update and merging on a GPU, beside the recorded times of other libraries.

A time is a twentieth of a CUDA graph of twenty calls, so small tensors stay in the L2 cache, as they do behind the
kernel that made them; GB/s count every tensor read and written once. A sample of each result is compared with float32
before it is timed. A ratio above 1 means that ours is faster.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

import flashinfer_core
from flashinfer_core import reference
from flashinfer_core.bench import gpu, report

REPEATS = 20
DTYPE = torch.bfloat16
HEADS, KV_HEADS, DIM, PAGE_SIZE = 32, 8, 128, 16
CHECKED = 16  # rows of each output


@dataclass(frozen=True)
class Row:
    """One operation on one shape: the bytes it moves, and what makes its call on a device and checks the result."""

    name: str
    bytes: int
    build: Callable[[torch.device], gpu.Call]


def rows() -> Iterator[Row]:
    """Yield every row, under its recorded name."""
    for tokens, hidden in ((1, 4096), (128, 8192), (8192, 8192)):
        size = tokens * hidden * DTYPE.itemsize
        yield Row(f"rmsnorm {tokens}x{hidden}", 2 * size, partial(rmsnorm, (tokens, hidden)))
        yield Row(f"fused_add_rmsnorm {tokens}x{hidden}", 4 * size, partial(fused_add, (tokens, hidden)))
    tokens = 8192
    size = tokens * DIM * DTYPE.itemsize
    yield Row(f"rope cos_sin_cache {tokens} {HEADS}/{KV_HEADS}", 2 * size * (HEADS + KV_HEADS), rope_cos_sin_cache)
    yield Row(f"rope pos_ids {tokens} {HEADS}/{KV_HEADS}", 2 * size * (HEADS + KV_HEADS), rope_pos_ids)
    yield Row(f"append_paged {tokens} {KV_HEADS} heads", 4 * size * KV_HEADS, append_paged)
    yield Row(f"merge_state {tokens}x{HEADS}x{DIM}", 3 * size * HEADS, merge_state)


def rmsnorm(shape: tuple[int, int], device: torch.device) -> gpu.Call:
    """Return the call on random rows."""
    x, weight = _random(device, *shape), _random(device, shape[1])
    out = torch.empty_like(x)

    def call() -> None:
        flashinfer_core.rmsnorm(x, weight, out=out)

    call()
    gpu.compare("rmsnorm", _sample(out), reference.rmsnorm(_sample(x), weight.cpu()))
    return call


def fused_add(shape: tuple[int, int], device: torch.device) -> gpu.Call:
    """Return the call on random rows, which it overwrites."""
    x, residual, weight = _random(device, *shape), _random(device, *shape), _random(device, shape[1])

    def call() -> None:
        flashinfer_core.fused_add_rmsnorm(x, residual, weight)

    expected = reference.fused_add_rmsnorm(_sample(x), _sample(residual), weight.cpu())
    call()
    for t, want in zip((x, residual), expected, strict=True):
        gpu.compare("fused_add_rmsnorm", _sample(t), want)
    return call


def rope_cos_sin_cache(device: torch.device, tokens: int = 8192) -> gpu.Call:
    """Return the call that rotates random q and k in place by a table."""
    q, k = _random(device, tokens, HEADS * DIM), _random(device, tokens, KV_HEADS * DIM)
    positions = torch.arange(tokens, device=device)
    table = reference.cos_sin_cache(tokens, reference.rope_frequencies(DIM)).to(device)

    def call() -> None:
        flashinfer_core.apply_rope_with_cos_sin_cache_inplace(positions, q, k, DIM, table)

    return _checked_rope(call, q.view(tokens, -1, DIM), k.view(tokens, -1, DIM))


def rope_pos_ids(device: torch.device, tokens: int = 8192) -> gpu.Call:
    """Return the call that rotates random q and k in place by computed angles."""
    q, k = _random(device, tokens, HEADS, DIM), _random(device, tokens, KV_HEADS, DIM)
    positions = torch.arange(tokens, dtype=torch.int32, device=device)

    def call() -> None:
        flashinfer_core.apply_rope_pos_ids_inplace(q, k, positions)

    return _checked_rope(call, q, k)


def append_paged(device: torch.device, tokens: int = 8192) -> gpu.Call:
    """Return the call that writes random keys and values of 8 requests into pages in random order."""
    key, value = _random(device, tokens, KV_HEADS, DIM), _random(device, tokens, KV_HEADS, DIM)
    requests, pages = 8, tokens // PAGE_SIZE
    cache = torch.zeros(pages, 2, PAGE_SIZE, KV_HEADS, DIM, dtype=DTYPE, device=device)
    indices = torch.randperm(pages, device=device).int()
    indptr = torch.arange(requests + 1, dtype=torch.int32, device=device) * (pages // requests)
    last_page_len = torch.full((requests,), PAGE_SIZE, dtype=torch.int32, device=device)
    token = torch.arange(tokens, dtype=torch.int32, device=device)
    where = token // (tokens // requests), token % (tokens // requests)

    def call() -> None:
        flashinfer_core.append_paged_kv_cache(key, value, *where, cache, indices, indptr, last_page_len)

    call()
    for i, t in enumerate((key, value)):
        if not torch.equal(cache[indices.long(), i].flatten(0, 1), t):
            raise RuntimeError("append_paged_kv_cache: expected the appended tokens in their pages, got others")
    return call


def merge_state(device: torch.device, tokens: int = 8192) -> gpu.Call:
    """Return the call that merges two random states."""
    v, s = torch.randn(2, tokens, HEADS, DIM, dtype=DTYPE, device=device), torch.randn(2, tokens, HEADS, device=device)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return flashinfer_core.merge_state(v[0], s[0], v[1], s[1])

    states = (torch.stack([_sample(t) for t in pair], dim=1) for pair in (v, s))
    for t, want in zip(call(), reference.merge_states(*states), strict=True):
        gpu.compare("merge_state", _sample(t), want)
    return call


def _checked_rope(call: gpu.Call, q: torch.Tensor, k: torch.Tensor) -> gpu.Call:
    tokens = len(q)
    positions = torch.arange(tokens - min(CHECKED, tokens), tokens)
    expected = [reference.apply_rope(_sample(t), positions, reference.rope_frequencies(DIM)) for t in (q, k)]
    call()
    for t, want in zip((q, k), expected, strict=True):
        gpu.compare("rope", _sample(t), want)
    return call


def _random(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=DTYPE, device=device)


def _sample(t: torch.Tensor) -> torch.Tensor:
    return t[-CHECKED:].cpu()


def main(arguments: Sequence[str]) -> int:
    """Measure, print a table, and return the exit status."""
    options = report.parser("ops", __doc__ or "").parse_args(arguments)
    problem = report.unusable(options)
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    timer, ceilings = report.start(options)
    results = []
    for row in rows():
        if options.rows in row.name:
            call = row.build(report.gpu_of(options))
            ours = timer.measure({"ours": call}, cold=False, repeats=REPEATS)["ours"]
            floor_us = ceilings.floor_us(0, 0, row.bytes)
            rate = row.bytes / 1e3 / ours.us
            results.append(report.Result(row.name, ours.us, rate, "GB/s", floor_us, ours.clock_mhz, ours.watts))
            print(results[-1].line(), flush=True)
    return report.finish(results, options)
