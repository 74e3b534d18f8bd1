"""Cases of the small operations: the parameters that tests and benchmarks share, each able to check itself.

`check` runs the public function on fresh random numbers in poisoned surroundings and compares with
`flashinfer_core.reference`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashinfer_core import activation, norm, page, reference, rope
from flashinfer_core.testing.tensors import Embedded, assert_close, embed, poisoned, poisoned_memory

Dtype = torch.dtype


def _randn(generator: torch.Generator, *shape: int, dtype: Dtype, device: str, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class NormCase:
    """One call of a norm."""

    op: str
    shape: tuple[int, ...]
    dtype: Dtype = torch.bfloat16
    weight_dtype: Dtype | None = None
    eps: float = 1e-6
    gap: int = 0
    out: str = "new"  # new, given, input
    seed: int = 0

    def check(self, device: str = "cpu") -> None:
        """Compare with the reference."""
        generator = _generator(self.seed)
        weight_dtype = self.weight_dtype or self.dtype
        x = embed(_randn(generator, *self.shape, dtype=self.dtype, device=device, scale=3.0), self.gap, self.gap)
        weights = [
            _randn(generator, self.shape[-1], dtype=weight_dtype, device=device)
            for _ in range(2 if self.op == "layernorm" else 1)
        ]
        if "fused_add" in self.op:
            self._check_fused_add(x, weights[0], generator, device)
            return
        expected = getattr(reference, self.op)(x.view, *weights, eps=self.eps)
        given = embed(poisoned(self.shape, self.dtype, device), self.gap, 2 * self.gap)
        keywords = (
            {} if self.op == "layernorm" or self.out == "new" else {"out": {"given": given, "input": x}[self.out].view}
        )
        before = x.view.clone()
        with poisoned_memory():
            actual = getattr(norm, self.op)(x.view, *weights, eps=self.eps, **keywords)
        assert_close(actual, expected, self.dtype)
        if keywords:
            assert actual is keywords["out"]
        if self.out != "input" or self.op == "layernorm":
            assert torch.equal(x.view, before), "the input was changed"
        x.assert_intact()
        given.assert_intact()

    def _check_fused_add(self, x: Embedded, weight: torch.Tensor, generator: torch.Generator, device: str) -> None:
        residual = embed(_randn(generator, *self.shape, dtype=self.dtype, device=device, scale=3.0), self.gap, self.gap)
        expected = getattr(reference, self.op)(x.view, residual.view, weight, self.eps)
        assert getattr(norm, self.op)(x.view, residual.view, weight, self.eps) is None
        for actual, want in zip((x, residual), expected, strict=True):
            assert_close(actual.view, want, self.dtype)
            actual.assert_intact()


@dataclass(frozen=True)
class ActivationCase:
    """One call of a gated activation; shape is that of the result."""

    op: str
    shape: tuple[int, ...]
    dtype: Dtype = torch.bfloat16
    gap: int = 0
    out: str = "new"  # new, given
    seed: int = 0

    def check(self, device: str = "cpu") -> None:
        """Compare with the reference."""
        shape = (*self.shape[:-1], 2 * self.shape[-1])
        x = embed(_randn(_generator(self.seed), *shape, dtype=self.dtype, device=device, scale=3.0), self.gap, self.gap)
        given = embed(poisoned(self.shape, self.dtype, device), self.gap, 2 * self.gap)
        with poisoned_memory():
            actual = getattr(activation, self.op)(x.view, given.view if self.out == "given" else None)
        assert_close(actual, getattr(reference, self.op)(x.view), self.dtype)
        x.assert_intact()
        given.assert_intact()


@dataclass(frozen=True)
class RopeCase:
    """One rotation of queries and keys."""

    form: str  # indptr, pos_ids, cache
    lens: tuple[int, ...]  # tokens of each request
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    rotary_dim: int | None = None
    interleave: bool = False
    inplace: bool = False
    llama31: bool = False
    rope_scale: float = 1.0
    rope_theta: float = 1e4
    dtype: Dtype = torch.bfloat16
    index_dtype: Dtype = torch.int32
    gap: int = 0
    max_position: int = 5000
    seed: int = 0

    def check(self, device: str = "cpu") -> None:
        """Compare with the reference."""
        generator = _generator(self.seed)
        tokens = sum(self.lens)
        rotary_dim = self.head_dim if self.rotary_dim is None else self.rotary_dim
        q, k = (
            embed(_randn(generator, tokens, heads, self.head_dim, dtype=self.dtype, device=device), self.gap, self.gap)
            for heads in self.heads
        )
        indptr = torch.tensor([0, *self.lens]).cumsum(0).to(self.index_dtype).to(device)
        offsets = torch.randint(self.max_position, (len(self.lens),), generator=generator).to(self.index_dtype)
        positions = reference.positions_of(indptr, offsets).to(self.index_dtype).to(device)
        make = reference.llama31_rope_frequencies if self.llama31 else reference.rope_frequencies
        frequencies = make(rotary_dim, self.rope_scale, self.rope_theta)
        expected = [reference.apply_rope(x.view, positions, frequencies, self.interleave) for x in (q, k)]

        name = "apply_llama31_rope" if self.llama31 else "apply_rope"
        keywords: dict[str, Any] = {"rotary_dim": self.rotary_dim, "interleave": self.interleave}
        keywords |= {"rope_scale": self.rope_scale, "rope_theta": self.rope_theta}
        arguments: list[Any] = [q.view, k.view, indptr, offsets.to(device)]
        if self.form == "pos_ids":
            name, arguments = f"{name}_pos_ids", [q.view, k.view, positions]
        elif self.form == "cache":
            name = "apply_rope_with_cos_sin_cache"
            table = reference.cos_sin_cache(self.max_position + max((0, *self.lens)), frequencies).to(device)
            arguments = [positions, q.view, k.view, self.head_dim, table, not self.interleave]
            keywords = {}
            if self.gap == 0:  # the engines' form, heads and dimensions merged
                arguments[1:3] = [
                    x.view.view(tokens, heads * self.head_dim) for x, heads in zip((q, k), self.heads, strict=True)
                ]
        if self.inplace:
            assert getattr(rope, f"{name}_inplace")(*arguments, **keywords) is None
            actual = [q.view, k.view]
        else:
            with poisoned_memory():
                actual = [
                    out.view(want.shape)
                    for out, want in zip(getattr(rope, name)(*arguments, **keywords), expected, strict=True)
                ]
        for got, want in zip(actual, expected, strict=True):
            assert_close(got, want, self.dtype)
            assert torch.equal(got[..., rotary_dim:].float(), want[..., rotary_dim:])
        q.assert_intact()
        k.assert_intact()


@dataclass(frozen=True)
class AppendCase:
    """One append to a paged KV cache; with ``slots`` in the engines' form."""

    lens: tuple[tuple[int, int], ...]  # for each request: tokens before, tokens appended
    page_size: int = 16
    heads: int = 8
    dims: tuple[int, int] = (128, 128)
    dtype: Dtype = torch.bfloat16
    cache_dtype: Dtype | None = None
    index_dtype: Dtype = torch.int32
    kv_layout: str = "NHD"
    fused: bool = False  # one 5-D tensor
    slots: bool = False
    scales: tuple[float, float] = (1.0, 1.0)  # of an FP8 cache, with slots
    scale_tensors: bool = False
    padding: int = 0  # tokens at the end that are not to be written
    gap: int = 0
    skew: int = 1  # elements by which the layouts of K and V differ
    seed: int = 0

    def check(self, device: str = "cpu") -> None:
        """Compare with the reference, every byte of the cache and around it."""
        generator = _generator(self.seed)
        totals = [before + appended for before, appended in self.lens]
        pages = [-(-total // self.page_size) for total in totals]
        kv_indptr = torch.tensor([0, *pages]).cumsum(0)
        num_pages = int(kv_indptr[-1]) + 2
        kv_indices = torch.randperm(num_pages, generator=generator)
        last = torch.tensor([(total - 1) % self.page_size + 1 for total in totals], dtype=torch.int64)
        append_indptr = torch.tensor([0, *(appended for _, appended in self.lens)]).cumsum(0)
        tokens = int(append_indptr[-1]) + self.padding
        batch_indices, positions = reference.get_batch_indices_positions(
            append_indptr, torch.tensor(totals, dtype=torch.int64), tokens
        )
        order = torch.randperm(tokens, generator=generator)
        batch_indices, positions = batch_indices[order], positions[order]

        key, value = (
            embed(_randn(generator, tokens, self.heads, dim, dtype=self.dtype, device=device), self.gap, self.gap).view
            for dim in self.dims
        )
        caches = self._caches(generator, num_pages, device)
        views = [cache.view for cache in caches] if not self.fused else [caches[0].view[:, 0], caches[0].view[:, 1]]
        nhd = views if self.kv_layout == "NHD" else [view.transpose(1, 2) for view in views]
        expected = [view.clone().cpu() for view in nhd]
        keys, values = (
            reference.stored(x.cpu(), cache.dtype, scale)
            for x, cache, scale in zip((key, value), expected, self.scales, strict=True)
        )
        reference.append_paged_kv_cache(
            keys, values, batch_indices, positions, expected[0], expected[1], kv_indices, kv_indptr
        )

        def index(t: torch.Tensor) -> torch.Tensor:
            return t.to(self.index_dtype).to(device)

        if self.slots:
            page_of = kv_indices[
                (kv_indptr[batch_indices.clamp(min=0).long()] + positions // self.page_size).clamp(max=num_pages - 1)
            ]
            slot_mapping = torch.where(batch_indices < 0, -1, page_of * self.page_size + positions % self.page_size)
            scales: list[float | torch.Tensor] = [*self.scales]
            if self.scale_tensors:
                scales = [torch.full((1,), scale, device=device) for scale in self.scales]
            page.write_kv_slots(key, value, nhd[0], nhd[1], index(slot_mapping), *scales)
        else:
            cache = caches[0].view if self.fused else (views[0], views[1])
            page.append_paged_kv_cache(
                key, value, index(batch_indices), index(positions), cache, index(kv_indices), index(kv_indptr),
                index(last), self.kv_layout,
            )  # fmt: skip
        for got, want in zip(nhd, expected, strict=True):
            assert torch.equal(_bytes(got).cpu(), _bytes(want))
        for embedded in caches:
            embedded.assert_intact()

    def _caches(self, generator: torch.Generator, num_pages: int, device: str) -> list[Embedded]:
        block = (self.page_size, self.heads) if self.kv_layout == "NHD" else (self.heads, self.page_size)
        dtype = self.cache_dtype or self.dtype
        if self.fused:
            shape = (num_pages, 2, *block, self.dims[0])
            return [embed(_randn(generator, *shape, dtype=dtype, device=device), self.gap, self.skew)]
        return [
            embed(_randn(generator, num_pages, *block, dim, dtype=dtype, device=device), self.gap + skew, skew)
            for dim, skew in zip(self.dims, (0, self.skew), strict=True)
        ]


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)
