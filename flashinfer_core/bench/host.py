"""What a call costs the host: `plan` and `run` of the attention wrappers, and a small operation.

On a GPU the calls are queued and nothing waits for it; the batch is a decode step of few keys, so that the GPU keeps up
with the queue. On the CPU, where `run` also computes, it has one head of 8 elements and one key a request. Times are
medians of batches of calls, beside those recorded for FlashInfer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import flashinfer_core
from flashinfer_core.bench import peers

BATCHES = (64, 256)
PAGE_SIZE = 16


def calls(batch: int, device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each call under its recorded name."""
    on_gpu = device.type == "cuda"
    heads, kv_heads, dim, kv_len = (32, 8, 128, PAGE_SIZE) if on_gpu else (1, 1, 8, 1)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    q = torch.randn(batch, heads, dim, dtype=dtype, device=device)
    cache = torch.randn(batch, 2, PAGE_SIZE, kv_heads, dim, dtype=dtype, device=device)
    out, workspace = torch.empty_like(q), torch.empty(64 << 20, dtype=torch.uint8, device=device)
    host = [
        torch.arange(batch + 1, dtype=torch.int32),
        torch.arange(batch, dtype=torch.int32),
        torch.full((batch,), kv_len, dtype=torch.int32),
    ]
    shape = (heads, kv_heads, dim, PAGE_SIZE)
    decode: Any = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper(workspace)
    yield "decode plan, indices on the host", lambda: decode.plan(*host, *shape, q_data_type=dtype)
    yield "decode run", lambda: decode.run(q, cache, out=out)
    if on_gpu:
        there = [t.to(device) for t in host]
        yield "decode plan, indices on the GPU", lambda: decode.plan(*there, *shape, q_data_type=dtype)
    prefill: Any = flashinfer_core.BatchPrefillWithPagedKVCacheWrapper(workspace)
    yield "paged prefill plan", lambda: prefill.plan(host[0], *host, *shape, causal=True, q_data_type=dtype)
    yield "paged prefill run", lambda: prefill.run(q, cache, out=out)
    x, weight = q.view(batch, -1), torch.ones(heads * dim, dtype=dtype, device=device)
    yield "rmsnorm", lambda: flashinfer_core.rmsnorm(x, weight)


def host_us(call: Callable[[], object], device: torch.device, rounds: int = 20, each: int = 25) -> float:
    """Return the median, over the rounds, of the microseconds of a call."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times = []
    for _ in range(rounds + 2):
        wait()
        start = time.perf_counter()
        for _ in range(each):
            call()
        times.append((time.perf_counter() - start) / each * 1e6)
    wait()
    return statistics.median(times[2:])


def main(arguments: Sequence[str]) -> int:
    """Measure, print a table, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m flashinfer_core.bench host", description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="cpu or a GPU (default here: %(default)s)")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("error: no CUDA device; --device cpu measures the kernels for CPUs", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'}, torch {torch.__version__}")
    print(f"recorded times: {peers.recorded()['source']}")
    print(f"{'call':44}{'ours':>11}  recorded")
    for batch in BATCHES:
        for name, call in calls(batch, device):
            us = host_us(call, device)
            row = f"{name}, batch {batch}"
            theirs = "  ".join(f"{peer} {t:.1f}" for peer, t in peers.recorded_us(row).items())
            print(f"{row:44}{us:8.1f} us  {theirs or '-'}", flush=True)
    return 0
