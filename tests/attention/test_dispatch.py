"""The table that says which CUDA kernel runs, and the tensor maps of the one for SM90. No GPU is asked."""

from __future__ import annotations

import math

import pytest

from flashinfer_core import _native
from flashinfer_core.attention.dispatch import Brought, Planned, lack_of_plan, lack_of_run
from flashinfer_core.attention.kernels import specs
from flashinfer_core.attention.tiles import SM90_TILES, TILES

PREFILL = Planned(capability=90, tile="m128", dim_qk=128, dim_vo=128, kv_bytes=2, page_size=16)
TENSORS = Brought(kv_bytes=2, direct=False, rope=False, mapped=True)


@pytest.mark.parametrize("dims", SM90_TILES)
def test_prefill_on_sm90(dims: tuple[int, int]) -> None:
    plan = PREFILL._replace(dim_qk=dims[0], dim_vo=dims[1])
    assert lack_of_run(TENSORS) is None
    for page_size in (None, 8, 16, 24, 32, 64, 128, 256, 1024):
        assert lack_of_plan(plan._replace(page_size=page_size), fast=True) is None
    for page_size in (1, 2, 3, 4, 131):  # right, but slower than the universal kernel
        assert lack_of_plan(plan._replace(page_size=page_size), fast=False) is None
        assert lack_of_plan(plan._replace(page_size=page_size), fast=True) is not None


@pytest.mark.parametrize(
    ("change", "lack"),
    [
        ({"capability": 80}, "a GPU of compute capability 9.0"),
        ({"capability": 100}, "a GPU of compute capability 9.0"),
        ({"tile": "m16"}, "tiles of 128 rows"),
        ({"tile": "m64"}, "tiles of 128 rows"),
        ({"dim_qk": 80, "dim_vo": 80}, "head dims"),
        ({"dim_qk": 192, "dim_vo": 192}, "head dims"),
        ({"kv_bytes": 1}, "a 16-bit KV cache"),
    ],
)
def test_plans_of_the_universal_kernel(change: dict[str, object], lack: str) -> None:
    for fast in (False, True):
        found = lack_of_plan(PREFILL._replace(**change), fast=fast)  # type: ignore[arg-type]
        assert found is not None
        assert found.startswith(lack)


@pytest.mark.parametrize("change", [{"kv_bytes": 1}, {"direct": True}, {"rope": True}, {"mapped": False}])
def test_runs_of_the_universal_kernel(change: dict[str, bool]) -> None:
    assert lack_of_run(TENSORS._replace(**change)) is not None


def test_both_kernels_can_run_one_work_list() -> None:
    """They share tiles and chunks: rows of a tile, and partial states of as many rows."""
    assert {tile.rows for tile in SM90_TILES.values()} == {TILES["m128"].rows}


@pytest.mark.parametrize("dims", SM90_TILES)
def test_shared_memory(dims: tuple[int, int]) -> None:
    """Queries, and stages of keys and values, in whole rows; what else a CTA needs takes less than 1 KiB."""
    sm90 = SM90_TILES[dims]
    inputs = 2 * (sm90.rows * dims[0] + sm90.stages * sm90.block_keys * sum(dims))
    assert 0 < sm90.smem_bytes(*dims) - inputs < 1024
    assert sm90.smem_bytes(*dims) <= 227 * 1024
    assert _native.attention_sm90_smem_bytes(sm90.block_keys, sm90.stages, *dims) == sm90.smem_bytes(*dims)
    # A page of 16 slots is made of boxes, whose rows are whole groups of eight.
    assert math.gcd(sm90.block_keys, 16) == 16


def test_the_bundle_has_it() -> None:
    assert any(spec.source == "attention/attention_sm90.cuh" for spec in specs("90a"))
    assert not any(spec.source == "attention/attention_sm90.cuh" for spec in specs("100"))
