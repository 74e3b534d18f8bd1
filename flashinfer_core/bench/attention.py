"""Attention on a GPU, beside the recorded times of other libraries and, if asked for, torch's own in the same run.

Prefill rows are ragged, the others paged (16 tokens a page, in random order); all have random bf16 data, and a sample
of each output is compared with float32 before anything is timed. Times are medians of CUDA-graph replays between
events, for decode and cascade rows with the L2 cache flushed before each. FLOP/s count the visible pairs, GB/s the keys
and values of the requests, a shared prefix once. A ratio above 1 means that ours is faster.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from flashinfer_core import reference
from flashinfer_core.attention.decode import BatchDecodeWithPagedKVCacheWrapper
from flashinfer_core.attention.prefill import BatchPrefillWithPagedKVCacheWrapper
from flashinfer_core.attention.ragged import BatchPrefillWithRaggedKVCacheWrapper
from flashinfer_core.bench import gpu, peers, report
from flashinfer_core.cascade import MultiLevelCascadeAttentionWrapper
from flashinfer_core.utils import get_indptr

PAGE_SIZE = 16
DTYPE = torch.bfloat16
Pair = tuple[torch.Tensor, torch.Tensor]
Run = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """A batch of requests, each (query tokens, keys)."""

    name: str
    lens: tuple[tuple[int, int], ...]
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    causal: bool = True
    ragged: bool = False
    kv_dtype: torch.dtype = DTYPE
    shared: int = 0  # keys of a prefix that all requests share, beside their own

    @property
    def operations(self) -> float:
        """Multiplications and additions: half of the square of new tokens if causal."""
        pairs = sum(qo * (self.shared + kv) - (qo * qo / 2 if self.causal and qo > 1 else 0) for qo, kv in self.lens)
        return 4 * self.dim * self.heads * pairs

    @property
    def bytes(self) -> int:
        """Size of the keys and values, those of the prefix once."""
        keys = self.shared + sum(kv for _, kv in self.lens)
        return 2 * self.dim * self.kv_heads * keys * self.kv_dtype.itemsize

    @property
    def memory_bound(self) -> bool:
        """Whether the row is read for its bandwidth."""
        return self.lens[0][0] == 1

    @property
    def fits_sdpa(self) -> bool:
        """Whether torch's attention can do it: one length, square or a single query, q's dtype."""
        qo, kv = self.lens[0]
        plain = self.kv_dtype == DTYPE and self.shared == 0
        return plain and len(set(self.lens)) == 1 and (qo == 1 or qo == kv)


def rows() -> Iterator[Row]:
    """Yield every row, under its recorded name."""
    for batch, tokens, causal, heads, kv_heads, dim in (
        (1, 8192, True, 32, 8, 128),
        (4, 4096, True, 32, 8, 128),
        (16, 1024, True, 32, 8, 128),
        (1, 32768, True, 32, 8, 128),
        (4, 4096, False, 32, 8, 128),
        (4, 4096, True, 64, 64, 128),
        (4, 4096, True, 32, 8, 64),
        (4, 4096, True, 32, 8, 256),
    ):
        name = f"prefill {batch}x{tokens} {heads}/{kv_heads} d{dim} {'causal' if causal else 'full'}"
        yield Row(name, ((tokens, tokens),) * batch, heads, kv_heads, dim, causal, ragged=True)
    for batch, kv, heads, kv_heads in (
        (1, 8192, 32, 8),
        (1, 131072, 32, 8),
        (16, 4096, 32, 8),
        (64, 2048, 32, 8),
        (128, 8192, 32, 8),
        (256, 1024, 32, 8),
        (64, 2048, 64, 8),
        (64, 2048, 32, 32),
    ):
        yield Row(f"decode {batch}x{kv} {heads}/{kv_heads}", ((1, kv),) * batch, heads, kv_heads)
    yield Row("decode 64x4096 fp8kv 32/8", ((1, 4096),) * 64, kv_dtype=torch.float8_e4m3fn)
    yield Row("decode skew 63x512+1x65536 32/8", ((1, 512),) * 63 + ((1, 65536),))
    # The 8,192 keys include the 512 new tokens: the recorded time and FLOP/s give 7,936 visible keys a query.
    yield Row("paged append b8 q512 kv8192 32/8", ((512, 8192),) * 8)
    for shared in (8192, 32768):
        for batch in (64, 256):
            yield Row(f"cascade shared{shared} b{batch} uniq256", ((1, 256),) * batch, shared=shared)


class Problem:
    """The tensors of a row on a GPU, and the planned call.

    Parameters
    ----------
    row
        The shape.
    device
        The GPU.
    indices_on
        Where `plan` finds the page table: a device.
    """

    def __init__(self, row: Row, device: torch.device, indices_on: torch.device) -> None:
        self._row = row
        self._indices_on = indices_on
        qo_lens, kv_lens = (torch.tensor(lens) for lens in zip(*row.lens, strict=True))
        self.qo_indptr = get_indptr(qo_lens)
        self.q = torch.randn(int(self.qo_indptr[-1]), row.heads, row.dim, dtype=DTYPE, device=device)
        self.out = torch.empty_like(self.q)
        self._workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
        if row.ragged:
            self._kv_indptr = get_indptr(kv_lens)
            self._k, self._v = self._random(int(self._kv_indptr[-1]))
            self._attend = self._ragged()
        else:
            # Requests own runs of a shuffled list of pages; the last run is the shared prefix.
            counts = torch.cat([kv_lens, torch.tensor([row.shared])]) // PAGE_SIZE
            self._kv_indptr = get_indptr(counts)
            self._indices = torch.randperm(int(self._kv_indptr[-1]))
            self._k, self._v = (
                t.view(-1, PAGE_SIZE, row.kv_heads, row.dim) for t in self._random(len(self._indices) * PAGE_SIZE)
            )
            self._attend = self._cascade() if row.shared else self._paged()

    def call(self) -> None:
        """Compute the output."""
        self.out = self._attend()

    def keys(self, request: int) -> Pair:
        """Return K and V ``[kv_len, heads, dim]`` of a request."""
        k, v = self._k, self._v
        if self._row.ragged:
            return k[self._span(request)], v[self._span(request)]
        owners = [len(self._row.lens), request] if self._row.shared else [request]
        pages = torch.cat([self._indices[self._span(owner)] for owner in owners]).to(k.device)
        # Bytes, since not every version of torch gathers FP8.
        k, v = (t.view(torch.uint8)[pages].view(t.dtype).flatten(0, 1) for t in (k, v))
        return k, v

    def _span(self, request: int) -> slice:
        begin, end = self._kv_indptr[request : request + 2].tolist()
        return slice(begin, end)

    def check(self) -> None:
        """Compare rows of the first and the last request with float32, for one head of K and V."""
        self.call()
        row, group = self._row, self._row.heads // self._row.kv_heads
        head = row.kv_heads - 1
        for request in {0, len(row.lens) - 1}:
            k, v = (t[:, head : head + 1].float().cpu() for t in self.keys(request))
            qo, first = row.lens[request][0], int(self.qo_indptr[request])
            for i in {0, qo // 2, qo - 1}:
                at, of = slice(first + i, first + i + 1), slice(head * group, (head + 1) * group)
                seen = len(k) - qo + i + 1 if row.causal else len(k)
                expected, _ = reference.attention(self.q[at, of].cpu(), k[:seen], v[:seen])
                gpu.compare(row.name, self.out[at, of].cpu(), expected)

    def sdpa(self, name: str) -> Callable[[], torch.Tensor] | str:
        """Return the call of a peer that torch has, or why there is none; its output is compared with ours."""
        if not self._row.fits_sdpa:
            return "no such shape"
        batch = len(self._row.lens)
        k, v = (torch.stack(parts) for parts in zip(*map(self.keys, range(batch)), strict=True))
        call = peers.sdpa(name, self.q.view(batch, -1, *self.q.shape[1:]), k, v, self._row.causal and self._row.ragged)
        if not isinstance(call, str):
            gpu.compare(name, call().flatten(0, 1), self.out)
        return call

    def _random(self, tokens: int) -> list[torch.Tensor]:
        shape = (tokens, self._row.kv_heads, self._row.dim)
        return [torch.randn(shape, dtype=DTYPE, device=self.q.device).to(self._row.kv_dtype) for _ in "kv"]

    def _array(self, t: torch.Tensor) -> torch.Tensor:
        return t.to(self._indices_on, torch.int32)

    def _ragged(self) -> Run:
        row = self._row
        wrapper: Any = BatchPrefillWithRaggedKVCacheWrapper(self._workspace)
        arrays = self._array(self.qo_indptr), self._array(self._kv_indptr)
        wrapper.plan(*arrays, row.heads, row.kv_heads, row.dim, causal=row.causal, q_data_type=DTYPE)
        return partial(wrapper.run, self.q, self._k, self._v, out=self.out)

    def _paged(self) -> Run:
        row = self._row
        table = [self._array(t) for t in (self._kv_indptr[:-1], self._indices)]
        table.append(torch.full((len(row.lens),), PAGE_SIZE, dtype=torch.int32, device=self._indices_on))
        options: dict[str, Any] = {"q_data_type": DTYPE, "kv_data_type": row.kv_dtype}
        wrapper: Any
        if row.memory_bound:
            wrapper = BatchDecodeWithPagedKVCacheWrapper(self._workspace)
        else:
            wrapper = BatchPrefillWithPagedKVCacheWrapper(self._workspace)
            table.insert(0, self._array(self.qo_indptr))
            options["causal"] = row.causal
        wrapper.plan(*table, row.heads, row.kv_heads, row.dim, PAGE_SIZE, **options)
        return partial(wrapper.run, self.q, (self._k, self._v), out=self.out)

    def _cascade(self) -> Run:
        row, batch = self._row, len(self._row.lens)
        own = int(self._kv_indptr[-2])
        wrapper = MultiLevelCascadeAttentionWrapper(2, self._workspace)
        wrapper.plan(
            [self._array(t) for t in (torch.tensor([0, batch]), self.qo_indptr)],
            [self._array(t) for t in (torch.tensor([0, row.shared // PAGE_SIZE]), self._kv_indptr[:-1])],
            [self._array(t) for t in (self._indices[own:], self._indices[:own])],
            [torch.full((n,), PAGE_SIZE, dtype=torch.int32, device=self._indices_on) for n in (1, batch)],
            *(row.heads, row.kv_heads, row.dim, PAGE_SIZE),
            q_data_type=DTYPE,
        )
        return partial(wrapper.run, self.q, (self._k, self._v))


def measure(
    row: Row, timer: gpu.Timer, ceilings: gpu.Ceilings, problem: Problem, names: Sequence[str]
) -> report.Result:
    """Check and time one row, with the peers named."""
    problem.check()
    calls: dict[str, gpu.Call] = {"ours": problem.call}
    for name in names:
        peer = problem.sdpa(name)
        if isinstance(peer, str):
            print(f"{row.name}: not measured with {name}: {peer}", file=sys.stderr)
        else:
            calls[name] = peer
    timings = timer.measure(calls, cold=row.memory_bound)
    ours = timings.pop("ours")
    rate, unit = (row.bytes / 1e3, "GB/s") if row.memory_bound else (row.operations / 1e6, "TFLOP/s")
    floor_us = ceilings.floor_us(row.operations, row.bytes)
    peers_us = {name: timing.us for name, timing in timings.items()}
    return report.Result(row.name, ours.us, rate / ours.us, unit, floor_us, ours.clock_mhz, ours.watts, peers_us)


def main(arguments: Sequence[str]) -> int:
    """Measure, print a table, and return the exit status."""
    parser = report.parser("attention", __doc__ or "")
    parser.add_argument("--peer", default="", metavar="NAMES", help=f"measure too: {','.join(peers.BACKENDS)}")
    parser.add_argument(
        "--plan", choices=("host", "device"), default="host", help="where plan finds lengths (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    names = [name for name in options.peer.split(",") if name]
    unknown = [name for name in names if name not in peers.BACKENDS]
    problem = report.unusable(options)
    if unknown:
        problem = f"--peer: no {unknown[0]!r}; there are {', '.join(peers.BACKENDS)}"
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    timer, ceilings = report.start(options)
    device = report.gpu_of(options)
    indices_on = device if options.plan == "device" else torch.device("cpu")
    results = []
    for row in rows():
        if options.rows in row.name:
            results.append(measure(row, timer, ceilings, Problem(row, device, indices_on), names))
            print(results[-1].line(), flush=True)
    return report.finish(results, options)
