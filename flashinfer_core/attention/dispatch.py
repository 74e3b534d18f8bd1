"""Which CUDA kernel of attention runs: the one table, from a GPU, dtypes, head dims, pages, features and layouts.

The kernel for SM90 (``"fa3"``) is taken where everything that it needs holds, the universal one (``"fa2"``) for all
else. What a plan knows decides the shape of the work list, which both can run; what the tensors of a run say decides
the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from flashinfer_core.attention.tiles import SM90_TILES

MAX_STRIDE = 2**40  # bytes, of a tensor map


class Planned(NamedTuple):
    """What a plan knows."""

    capability: int  # of the GPU, 90 for 9.0
    tile: str  # as `tile_name` returns it
    dim_qk: int
    dim_vo: int
    kv_bytes: int  # of an element of the cache
    page_size: int | None


class Brought(NamedTuple):
    """What the tensors of a run say."""

    kv_bytes: int  # of an element of the cache
    direct: bool  # rows do not begin at multiples of 16 bytes
    rope: bool  # q and k are rotated on load
    mapped: bool  # a tensor map can have the sizes and strides of K and V


# What the kernel for SM90 needs of a plan.
_PLANNED: tuple[tuple[Callable[[Planned], bool], str], ...] = (
    (lambda plan: plan.capability == 90, "a GPU of compute capability 9.0"),
    (lambda plan: plan.tile == "m128", "tiles of 128 rows"),
    (lambda plan: (plan.dim_qk, plan.dim_vo) in SM90_TILES, f"head dims (of q, of v) of {tuple(SM90_TILES)}"),
    (lambda plan: plan.kv_bytes == 2, "a 16-bit KV cache"),
)
# What makes it the faster one, too. A box is what a block of keys and a page have in common: with 8 keys it is 1.4
# times as fast as the universal kernel, with 4 keys 0.85 times and with one 0.26 times.
_FAST: tuple[tuple[Callable[[Planned], bool], str], ...] = (
    (lambda plan: _box_keys(plan) >= 8, "pages that have 8 keys or more in common with a block"),
)
# What it needs of the tensors of a run.
_BROUGHT: tuple[tuple[Callable[[Brought], bool], str], ...] = (
    (lambda run: run.kv_bytes == 2, "a 16-bit KV cache"),
    (lambda run: not run.rope, "no rotation on load"),
    (lambda run: not run.direct, "tensors whose rows begin at multiples of 16 bytes"),
    (lambda run: run.mapped, "a cache that is not empty, with strides above 0 and below 2^40 bytes"),
)


def lack_of_plan(plan: Planned, *, fast: bool) -> str | None:
    """Return what the kernel for SM90 needs that a plan does not have, None if nothing.

    `fast`: to be the faster one, not only to be right.
    """
    needs = (*_PLANNED, *_FAST) if fast else _PLANNED
    return next((need for holds, need in needs if not holds(plan)), None)


def lack_of_run(run: Brought) -> str | None:
    """Return what the kernel for SM90 needs that the tensors of a run do not have, None if nothing."""
    return next((need for holds, need in _BROUGHT if not holds(run)), None)


def lack_of_planned(backend: str, plan: Planned) -> str | None:
    """Return why a plan is not made for the kernel for SM90, None if it is; refuse ``"fa3"`` where it cannot be."""
    if backend == "fa2":
        return "another backend than 'fa2'"
    return _unless_demanded(backend, lack_of_plan(plan, fast=backend == "auto"))


def lack_of_brought(backend: str, run: Brought) -> str | None:
    """Return why a run cannot take the kernel for SM90, None if it can; refuse ``"fa3"`` then."""
    return _unless_demanded(backend, lack_of_run(run))


def _unless_demanded(backend: str, lack: str | None) -> str | None:
    if lack is not None and backend == "fa3":
        raise NotImplementedError(f"backend: expected {lack} for 'fa3', got none; use 'auto' or 'fa2'")
    return lack


def _box_keys(plan: Planned) -> int:
    block = SM90_TILES[plan.dim_qk, plan.dim_vo].block_keys
    return block if plan.page_size is None else math.gcd(plan.page_size, block)
