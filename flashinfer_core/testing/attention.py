"""Cases of attention: parameters that tests and benchmarks share, each able to build its tensors and check itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch

import flashinfer_core
from flashinfer_core import reference
from flashinfer_core.testing.tensors import embed, poisoned, poisoned_memory

# Rounding of the weights and of the output to 16 bits, on values of about 1; float32 is for the order of summation.
Pair = tuple[torch.Tensor, torch.Tensor]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class PageTable(NamedTuple):
    """A page table in CSR form, as the wrappers' `plan` takes it."""

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor


@dataclass(frozen=True)
class AttentionCase:
    """A batch of requests, each (qo_len, kv_len)."""

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
    causal: bool = True
    window_left: int = -1
    logits_soft_cap: float = 0.0
    sinks: bool = False
    pos_encoding_mode: str = "NONE"
    custom_mask: bool = False
    sm_scale: float | None = None
    plan_options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

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
        return embed(q.to(self.dtype), self.gap, self.gap).view

    @cached_property
    def kv(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each request, ``[kv_len, heads, dim]``."""
        generator = self._random(1)
        return [
            (
                torch.randn(kv, self.num_kv_heads, self.head_dim_qk, generator=generator).to(self.dtype),
                torch.randn(kv, self.num_kv_heads, self.dim_vo, generator=generator).to(self.dtype),
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
        return torch.randn(self.num_qo_heads, generator=self._random(3)) if self.sinks else None

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
        if self.packed_kv:
            both = embed(poisoned((pages, size, heads, self.head_dim_qk + self.dim_vo), self.dtype), self.gap, 1, order)
            k, v = both.view.tensor_split((self.head_dim_qk,), dim=-1)
        else:
            k = embed(poisoned((pages, size, heads, self.head_dim_qk), self.dtype), self.gap, 1, order).view
            v = embed(poisoned((pages, size, heads, self.dim_vo), self.dtype), 2 * self.gap, 3, order).view
        for r, (keys, values) in enumerate(self.kv):
            begin, end = self.paged.indptr[r : r + 2].tolist()
            for i, page in enumerate(self.paged.indices[begin:end].tolist()):
                part = slice(i * size, min((i + 1) * size, len(keys)))
                k[page, : part.stop - part.start] = keys[part]
                v[page, : part.stop - part.start] = values[part]
        return (k, v) if self.kv_layout == "NHD" else (k.transpose(1, 2), v.transpose(1, 2))

    def expected(self) -> Pair:
        """Return the reference's output and log-sum-exp of all rows."""
        slopes = reference.alibi_slopes(self.num_qo_heads) if self.pos_encoding_mode == "ALIBI" else None
        pieces = [
            reference.attention(
                self.q[self.qo_indptr[r] : self.qo_indptr[r + 1]],
                k,
                v,
                causal=self.causal and not self.custom_mask,
                window_left=self.window_left,
                sm_scale=self.sm_scale,
                logits_soft_cap=self.logits_soft_cap,
                alibi_slopes=slopes,
                sinks=self.sink_logits,
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
            "custom_mask": self._flat_masks() if self.custom_mask else None,
            "head_dim_vo": self.dim_vo,
            **self.plan_options,
        }

    def _flat_masks(self) -> torch.Tensor:
        return torch.cat([torch.empty(0, dtype=torch.bool), *(mask.flatten() for mask in self.masks)])

    def run_paged(self) -> Pair:
        """Run the paged prefill wrapper."""
        wrapper = flashinfer_core.BatchPrefillWithPagedKVCacheWrapper(workspace(), self.kv_layout)
        wrapper.plan(
            self.qo_indptr,
            *self.paged,
            self.num_qo_heads,
            self.num_kv_heads,
            self.head_dim_qk,
            self.page_size,
            **self.options(),
        )
        with poisoned_memory():
            return cast(Pair, wrapper.run(self.q, self.cache, sinks=self.sink_logits, return_lse=True))

    def run_decode(self) -> Pair:
        """Run the decode wrapper; every request must have the same qo_len."""
        options = self.options()
        del options["causal"], options["custom_mask"], options["head_dim_vo"]
        wrapper = flashinfer_core.BatchDecodeWithPagedKVCacheWrapper(workspace(), self.kv_layout)
        wrapper.plan(
            *self.paged,
            self.num_qo_heads,
            self.num_kv_heads,
            self.head_dim_qk,
            self.page_size,
            q_len_per_req=self.lens[0][0] if self.lens else 1,
            **options,
        )
        with poisoned_memory():
            return cast(Pair, wrapper.run(self.q, self.cache, sinks=self.sink_logits, return_lse=True))

    def run_ragged(self) -> Pair:
        """Run the ragged prefill wrapper; it takes no sinks."""
        wrapper = flashinfer_core.BatchPrefillWithRaggedKVCacheWrapper(workspace(), self.kv_layout)
        wrapper.plan(
            self.qo_indptr, self.kv_indptr, self.num_qo_heads, self.num_kv_heads, self.head_dim_qk, **self.options()
        )
        order = (0, 1, 2) if self.kv_layout == "NHD" else (1, 0, 2)
        k, v = (
            embed(
                torch.cat([torch.empty(0, self.num_kv_heads, dim, dtype=self.dtype), *parts]), self.gap, 2, order
            ).view
            for dim, parts in (
                (self.head_dim_qk, [k for k, _ in self.kv]),
                (self.dim_vo, [v for _, v in self.kv]),
            )
        )
        if self.kv_layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        with poisoned_memory():
            return cast(Pair, wrapper.run(self.q, k, v, return_lse=True))

    def check(self, *forms: str) -> None:
        """Compare each form ("paged", "decode", "ragged") with the reference."""
        expected = self.expected()
        for form in forms:
            assert_attention_close(getattr(self, f"run_{form}")(), expected, self.dtype)


def workspace() -> torch.Tensor:
    """Return a workspace buffer; the CPU kernels use none of it."""
    return torch.empty(0, dtype=torch.uint8)


def assert_attention_close(
    actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> None:
    """Compare output and log-sum-exp; infinities and NaN must agree."""
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual[0].float(), expected[0], rtol=tolerance, atol=tolerance, equal_nan=True)
    # The log-sum-exp never passes through 16 bits.
    torch.testing.assert_close(actual[1], expected[1], rtol=2e-5, atol=2e-5, equal_nan=True)
