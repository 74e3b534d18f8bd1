"""Attention on the CPU beside vLLM's stock operator and torch's SDPA, all timed in turn in one run.

Every row reads one paged cache as vLLM lays it out (K and V side by side, pages of 128 tokens in random order). SDPA
gets keys and values gathered beforehand, without the cost of gathering. Decode rows have one query token a request;
prefill rows share 2,048 new tokens over the batch (at most the context), as a serving engine's chunks do. Times are
medians; a ratio above 1 means that ours is faster.
"""

import argparse
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from flashinfer_core import _native
from flashinfer_core.attention import AttentionPlan

PAGE_SIZE = 128
CHUNK = 2048
SHAPES = {"smollm2": (9, 3, 64), "llama-8b": (32, 8, 128)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STOCK = "flashinfer_core_vllm.stock_cpu"


@dataclass(frozen=True)
class Row:
    """One shape."""

    model: str
    dtype: str
    batch: int
    context: int
    qo_len: int

    @property
    def operations(self) -> int:
        """Multiplications and additions under the causal mask."""
        heads, _, dim = SHAPES[self.model]
        keys = sum(self.context - self.qo_len + i + 1 for i in range(self.qo_len))
        return 4 * dim * heads * self.batch * keys

    @property
    def bytes(self) -> int:
        """Size of the keys and values."""
        _, heads, dim = SHAPES[self.model]
        return 2 * dim * heads * self.batch * self.context * DTYPES[self.dtype].itemsize


def rows(batches: Sequence[int], contexts: Sequence[int]) -> Iterator[Row]:
    """Yield decode and prefill of every model, dtype, batch and context."""
    for model in SHAPES:
        for dtype in DTYPES:
            for batch in batches:
                for context in contexts:
                    yield Row(model, dtype, batch, context, 1)
                    yield Row(model, dtype, batch, context, min(context, CHUNK // batch))


def calls(row: Row) -> dict[str, Callable[[], object]]:
    """Return each implementation's call on the same random inputs; their results are compared first."""
    num_qo_heads, num_kv_heads, dim = SHAPES[row.model]
    dtype = DTYPES[row.dtype]
    pages = -(-row.context // PAGE_SIZE)
    cache = torch.randn(row.batch * pages, num_kv_heads, PAGE_SIZE, 2 * dim).to(dtype)
    table = torch.randperm(row.batch * pages).int().view(row.batch, pages)
    kv_lens = torch.full((row.batch,), row.context, dtype=torch.int32)
    qo_indptr = torch.arange(row.batch + 1, dtype=torch.int32) * row.qo_len
    q = torch.randn(row.batch * row.qo_len, num_qo_heads, dim).to(dtype)

    out = torch.empty_like(q)
    k, v = cache.transpose(1, 2).chunk(2, dim=-1)
    plan = AttentionPlan(
        qo_indptr,
        kv_lens,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=dim,
        page_size=PAGE_SIZE,
        block_table=table,
    )
    found: dict[str, Callable[[], object]] = {"ours": lambda: plan.run(q, k, v, out, sm_scale=dim**-0.5)}
    results = {"ours": out}

    if importlib.util.find_spec("vllm") is not None:
        results["stock"] = torch.empty_like(q)
        stock = importlib.import_module(STOCK)
        found["stock"] = stock.attention(q, cache, qo_indptr, kv_lens, table, results["stock"])

    gathered = cache[table.long()].permute(0, 2, 1, 3, 4).reshape(row.batch, num_kv_heads, -1, 2 * dim)
    keys, values = (part.contiguous() for part in gathered[:, :, : row.context].chunk(2, dim=-1))
    queries = q.view(row.batch, row.qo_len, num_qo_heads, dim).transpose(1, 2)
    mask = torch.ones(row.qo_len, row.context, dtype=torch.bool).tril(row.context - row.qo_len)

    def sdpa() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=None if row.qo_len == 1 else mask, enable_gqa=True
        )

    found["sdpa"] = sdpa
    for call in found.values():
        call()
    results["sdpa"] = sdpa().transpose(1, 2).reshape(q.shape)
    for result in results.values():
        torch.testing.assert_close(result, out, rtol=0.02, atol=0.02)
    return found


def measure(found: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Return the median seconds of each call, taken in turn for about `seconds` in all and at least five times."""
    times: dict[str, list[float]] = {name: [] for name in found}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["ours"]) < 5:
        for name, call in found.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def main(arguments: Sequence[str]) -> int:
    """Measure, print a table and its summary, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m flashinfer_core.bench cpu", description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="default: 1 8 32")
    parser.add_argument("--context", type=int, nargs="+", default=[512, 4096], help="default: 512 4096")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row (default: %(default)s)")
    options = parser.parse_args(arguments)
    print(f"{_native.cpu_isa()} kernels, {torch.get_num_threads()} threads")
    print(
        f"{'model':9}{'dtype':9}{'batch':>6}{'context':>8}{'q len':>6}{'ours':>12}{'GFLOP/s':>9}{'GB/s':>6}  ", end=""
    )
    print("times as fast as")
    ratios: dict[str, list[float]] = {}
    for row in rows(options.batch, options.context):
        taken = measure(calls(row), options.seconds)
        ours = taken.pop("ours")
        for name, seconds in taken.items():
            ratios.setdefault(name, []).append(seconds / ours)
        print(
            f"{row.model:9}{row.dtype:9}{row.batch:6}{row.context:8}{row.qo_len:6}{ours * 1e6:9.0f} us"
            f"{row.operations / ours / 1e9:9.1f}{row.bytes / ours / 1e9:6.1f}  "
            + "  ".join(f"{name} {seconds / ours:5.2f}" for name, seconds in taken.items()),
            flush=True,
        )
    for name, values in ratios.items():
        print(f"{name}: median {statistics.median(values):.2f}, lowest {min(values):.2f}")
    return 0
