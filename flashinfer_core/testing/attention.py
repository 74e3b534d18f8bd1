"""Cases of attention: parameters that tests and benchmarks share, each able to build its tensors and check itself."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch

import flashinfer_core
from flashinfer_core import reference
from flashinfer_core.testing.tensors import embed, poisoned, poisoned_memory

# Rounding of the weights and of the output to 16 bits, on values of about 1; float32 is for the order of summation.
Pair = tuple[torch.Tensor, torch.Tensor]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LSE_TOLERANCE = 2e-5  # the log-sum-exp never passes through 16 bits


class PageTable(NamedTuple):
    """A page table in CSR form, as the wrappers' `plan` takes it."""

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor


@dataclass(frozen=True)
class AttentionCase:
    """A batch of requests, each (qo_len, kv_len).

    `q`, `cache`, `sink_logits` and masks are made for `device`; the lengths and page tables are in host memory, and go
    to the wrappers as `arrays` says. The reference is computed on the CPU.
    """

    lens: tuple[tuple[int, int], ...]
    num_qo_heads: int = 4
    num_kv_heads: int = 2
    head_dim_qk: int = 64
    head_dim_vo: int | None = None
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_layout: str = "NHD"
    packed_kv: bool = False  # K and V side by side in the last dimension, as vLLM has them
    gap: int = 0  # elements of poison between rows
    skew: int = 1  # elements of poison before the first of K; 8 or 0 for rows that begin at multiples of 16 bytes
    causal: bool = True
    window_left: int = -1
    logits_soft_cap: float = 0.0
    sinks: bool = False
    pos_encoding_mode: str = "NONE"
    custom_mask: bool = False
    sm_scale: float | None = None
    plan_options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    kv_dtype: torch.dtype | None = None  # of the cache, if not that of q
    device: str = "cpu"
    arrays: str = "host"  # where index arrays are given to a GPU's wrappers: "host", "device", or "mixed"

    def on(self, device: str) -> AttentionCase:
        """Return the case for a device, on a GPU with float16 in place of float32, which has no kernel there."""
        half = device != "cpu" and self.dtype == torch.float32
        return replace(self, device=device, dtype=torch.float16 if half else self.dtype)

    @property
    def cache_dtype(self) -> torch.dtype:
        """Dtype of K and V."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    @property
    def dim_vo(self) -> int:
        """Head dim of V."""
        return self.head_dim_qk if self.head_dim_vo is None else self.head_dim_vo

    def _random(self, stream: int) -> torch.Generator:
        # One stream for each tensor: what one is does not depend on which was asked for first.
        return torch.Generator().manual_seed(self.seed * 8 + stream)

    @cached_property
    def qo_indptr(self) -> torch.Tensor:
        """First query row of each request, int32."""
        return torch.tensor([0, *(qo for qo, _ in self.lens)], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    @cached_property
    def kv_indptr(self) -> torch.Tensor:
        """First key of each request, int32."""
        return torch.tensor([0, *(kv for _, kv in self.lens)], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    @cached_property
    def q(self) -> torch.Tensor:
        """Queries of all requests."""
        q = torch.randn(int(self.qo_indptr[-1]), self.num_qo_heads, self.head_dim_qk, generator=self._random(0))
        return embed(q.to(self.dtype), self.gap, self.gap).to(self.device).view

    @cached_property
    def kv(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each request, ``[kv_len, heads, dim]``, on the CPU."""
        generator = self._random(1)
        return [
            (
                torch.randn(kv, self.num_kv_heads, self.head_dim_qk, generator=generator).to(self.cache_dtype),
                torch.randn(kv, self.num_kv_heads, self.dim_vo, generator=generator).to(self.cache_dtype),
            )
            for _, kv in self.lens
        ]

    @cached_property
    def masks(self) -> list[torch.Tensor]:
        """A random mask of each request in which every query sees its first key, unless there is none."""
        generator = self._random(2)
        masks = [torch.rand(qo, kv, generator=generator) < 0.6 for qo, kv in self.lens]
        for mask in masks:
            mask[:, :1] = True
        return masks

    @cached_property
    def sink_logits(self) -> torch.Tensor | None:
        """Sinks, if the case has them."""
        sinks = torch.randn(self.num_qo_heads, generator=self._random(3))
        return sinks.to(self.device) if self.sinks else None

    @cached_property
    def paged(self) -> PageTable:
        """CSR page table over shuffled pages."""
        counts = [-(-kv // self.page_size) for _, kv in self.lens]
        order = torch.randperm(sum(counts) + 3, generator=self._random(4))
        indptr = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        last = [(kv - 1) % self.page_size + 1 if kv else 0 for _, kv in self.lens]
        return PageTable(indptr, order[: sum(counts)].int(), torch.tensor(last, dtype=torch.int32))

    @cached_property
    def cache(self) -> Any:
        """The paged cache in the case's layout, poison in every slot that no request owns."""
        pages, heads, size = int(self.paged.indptr[-1]) + 3, self.num_kv_heads, self.page_size
        order = (0, 1, 2, 3) if self.kv_layout == "NHD" else (0, 2, 1, 3)  # of the dimensions in memory
        dims, dtype = (self.head_dim_qk, self.dim_vo), self.cache_dtype
        if self.packed_kv:
            made = [embed(poisoned((pages, size, heads, sum(dims)), dtype), self.gap, self.skew, order)]
        else:
            made = [
                embed(poisoned((pages, size, heads, dim), dtype), (i + 1) * self.gap, (2 * i + 1) * self.skew, order)
                for i, dim in enumerate(dims)
            ]
        k, v = self._k_and_v([t.view for t in made])
        for r, (keys, values) in enumerate(self.kv):
            begin, end = self.paged.indptr[r : r + 2].tolist()
            for i, page in enumerate(self.paged.indices[begin:end].tolist()):
                part = slice(i * size, min((i + 1) * size, len(keys)))
                k[page, : part.stop - part.start] = keys[part]
                v[page, : part.stop - part.start] = values[part]
        k, v = self._k_and_v([t.to(self.device).view for t in made])
        return (k, v) if self.kv_layout == "NHD" else (k.transpose(1, 2), v.transpose(1, 2))

    def _k_and_v(self, made: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return made[0].tensor_split((self.head_dim_qk,), dim=-1) if self.packed_kv else tuple(made)

    def expected(self) -> Pair:
        """Return the reference's output and log-sum-exp of all rows."""
        slopes = reference.alibi_slopes(self.num_qo_heads) if self.pos_encoding_mode == "ALIBI" else None
        pieces = [
            reference.attention(
                self.q[self.qo_indptr[r] : self.qo_indptr[r + 1]].cpu(),
                k,
                v,
                causal=self.causal and not self.custom_mask,
                window_left=self.window_left,
                sm_scale=self.sm_scale,
                logits_soft_cap=self.logits_soft_cap,
                alibi_slopes=slopes,
                sinks=None if self.sink_logits is None else self.sink_logits.cpu(),
                custom_mask=self.masks[r] if self.custom_mask else None,
                rope_scale_theta=(1.0, 1e4) if self.pos_encoding_mode == "ROPE_LLAMA" else None,
            )
            for r, (k, v) in enumerate(self.kv)
        ]
        empty = (
            torch.empty(0, self.num_qo_heads, self.dim_vo),
            torch.empty(0, self.num_qo_heads),
        )
        out, lse = zip(empty, *pieces, strict=True)
        return torch.cat(out), torch.cat(lse)

    def options(self) -> dict[str, Any]:
        """Return the keywords of `plan` that both prefill wrappers take."""
        return {
            "causal": self.causal,
            "window_left": self.window_left,
            "logits_soft_cap": self.logits_soft_cap,
            "sm_scale": self.sm_scale,
            "pos_encoding_mode": self.pos_encoding_mode,
            "q_data_type": self.dtype,
            "kv_data_type": self.cache_dtype,
            "custom_mask": self.flat_masks if self.custom_mask else None,
            "head_dim_vo": self.dim_vo,
            **self.plan_options,
        }

    @cached_property
    def flat_masks(self) -> torch.Tensor:
        """The masks of all requests as the wrappers take them."""
        flat = torch.cat([torch.empty(0, dtype=torch.bool), *(mask.flatten() for mask in self.masks)])
        return flat.to(self.device)

    @cached_property
    def placed(self) -> tuple[torch.Tensor, torch.Tensor, PageTable]:
        """`qo_indptr`, `kv_indptr` and `paged` where they go to a wrapper; mixed: lengths of queries on the host."""
        table, lengths = ("cpu", "cpu") if self.arrays == "host" else (self.device, self.device)
        if self.arrays == "mixed":
            lengths = "cpu"
        paged = PageTable(self.paged.indptr.to(lengths), *(t.to(table) for t in self.paged[1:]))
        return self.qo_indptr.to(lengths), self.kv_indptr.to(table), paged

    def plan_paged(self, wrapper: flashinfer_core.BatchPrefillWithPagedKVCacheWrapper) -> None:
        """Plan the case with a paged prefill wrapper."""
        qo_indptr, _, paged = self.placed
        wrapper.plan(
            qo_indptr,
            *paged,
            self.num_qo_heads,
            self.num_kv_heads,
            self.head_dim_qk,
            self.page_size,
            **self.options(),
        )

    def plan_decode(self, wrapper: flashinfer_core.BatchDecodeWithPagedKVCacheWrapper) -> None:
        """Plan the case with a decode wrapper; every request must have the same qo_len."""
        options = self.options()
        del options["causal"], options["custom_mask"], options["head_dim_vo"]
        wrapper.plan(
            *self.placed[2],
            self.num_qo_heads,
            self.num_kv_heads,
            self.head_dim_qk,
            self.page_size,
            q_len_per_req=self.lens[0][0] if self.lens else 1,
            **options,
        )

    def plan_ragged(self, wrapper: flashinfer_core.BatchPrefillWithRaggedKVCacheWrapper) -> None:
        """Plan the case with a ragged prefill wrapper."""
        qo_indptr, kv_indptr, _ = self.placed
        wrapper.plan(
            qo_indptr,
            kv_indptr,
            self.num_qo_heads,
            self.num_kv_heads,
            self.head_dim_qk,
            **self.options(),
        )

    @cached_property
    def ragged(self) -> tuple[torch.Tensor, ...]:
        """K and V of all requests, without padding, in the case's layout."""
        order = (0, 1, 2) if self.kv_layout == "NHD" else (1, 0, 2)
        k, v = (
            embed(
                torch.cat([torch.empty(0, self.num_kv_heads, dim).to(self.cache_dtype), *parts]),
                self.gap,
                2 * self.skew,
                order,
            )
            .to(self.device)
            .view
            for dim, parts in (
                (self.head_dim_qk, [k for k, _ in self.kv]),
                (self.dim_vo, [v for _, v in self.kv]),
            )
        )
        return (k, v) if self.kv_layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))

    def run_paged(self) -> Pair:
        """Run the paged prefill wrapper."""
        wrapper = flashinfer_core.BatchPrefillWithPagedKVCacheWrapper(workspace(self.device), self.kv_layout)
        self.plan_paged(wrapper)
        with poisoned_memory():
            return cast(Pair, wrapper.run(self.q, self.cache, sinks=self.sink_logits, return_lse=True))

    def run_decode(self) -> Pair:
        """Run the decode wrapper; every request must have the same qo_len."""
        wrapper = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper(workspace(self.device), self.kv_layout)
        self.plan_decode(wrapper)
        with poisoned_memory():
            return cast(Pair, wrapper.run(self.q, self.cache, sinks=self.sink_logits, return_lse=True))

    def run_ragged(self) -> Pair:
        """Run the ragged prefill wrapper; it takes no sinks."""
        wrapper = flashinfer_core.BatchPrefillWithRaggedKVCacheWrapper(workspace(self.device), self.kv_layout)
        self.plan_ragged(wrapper)
        with poisoned_memory():
            return cast(Pair, wrapper.run(self.q, *self.ragged, return_lse=True))

    def check(self, *forms: str) -> None:
        """Compare each form ("paged", "decode", "ragged") with the reference."""
        expected = self.expected()
        for form in forms:
            self.compare(getattr(self, f"run_{form}")(), expected)

    def compare(self, actual: Pair, expected: Pair | None = None) -> None:
        """Compare a result with the reference's."""
        # A GPU rounds the rotated q and k to 16 bits before their product.
        rounded = self.device != "cpu" and self.pos_encoding_mode == "ROPE_LLAMA"
        expected = self.expected() if expected is None else expected
        assert_attention_close(actual, expected, self.dtype, TOLERANCE[self.dtype] if rounded else LSE_TOLERANCE)


def workspace(device: str = "cpu") -> torch.Tensor:
    """Return a workspace buffer of a device; it holds nothing, so wrappers for a GPU allocate what they need."""
    return torch.empty(0, dtype=torch.uint8, device=device)


def assert_attention_close(
    actual: Pair, expected: Pair, dtype: torch.dtype, lse_tolerance: float = LSE_TOLERANCE
) -> None:
    """Compare output and log-sum-exp; infinities and NaN must agree."""
    tolerance = TOLERANCE[dtype]
    out, lse = (t.to(like.device) for t, like in zip(actual, expected, strict=True))
    torch.testing.assert_close(out.float(), expected[0], rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(lse, expected[1], rtol=lse_tolerance, atol=lse_tolerance, equal_nan=True)
