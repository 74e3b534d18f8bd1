"""Which CUDA kernel an attention call runs, and why: the answer of ``flashinfer-core explain``. No GPU is asked."""

from __future__ import annotations

import torch

from flashinfer_core.attention.dispatch import Brought, Planned, lack_of_plan, lack_of_run
from flashinfer_core.attention.kernels import (
    Variant,
    attention_sm90_spec,
    attention_spec,
    merge_spec,
    smem_of_capability,
)
from flashinfer_core.attention.tiles import SM90_TILES, Sm90Tile, Tile, choose_tile, ctas_per_sm


def explain(variant: Variant, *, capability: int, page_size: int | None, backend: str = "auto") -> dict[str, str]:
    """Follow the dispatch of a call whose caches are neither empty nor of strides that no tensor map can have.

    Parameters
    ----------
    variant
        Dtypes, head dims, kind of tile and features; ``features.direct`` as the caller's tensors want it.
    capability
        Of the GPU, such as 90.
    page_size
        Tokens of a page; None without pages.
    backend
        ``"auto"``, ``"fa2"`` or ``"fa3"``.

    Returns
    -------
    dict of str to str
        What there is to say, by what it is about.

    Raises
    ------
    NotImplementedError
        A GPU that is not served, ``"fa3"`` where it cannot run, or head dims whose tiles do not fit into the GPU's
        shared memory.
    """
    if capability < 75 or (capability < 80 and torch.bfloat16 in variant[:3]):
        raise NotImplementedError(f"capability: expected 80 or more (75 with float16), got {capability}")
    dims = variant.dim_qk, variant.dim_vo
    features = variant.features
    features = features._replace(direct=features.direct or features.rope or capability < 80)
    variant = variant._replace(features=features, tile="m128" if backend == "fa3" else variant.tile)
    lack: str | None = "another backend than 'fa2'"
    if backend != "fa2":
        plan = Planned(capability, variant.tile, *dims, variant.kv_dtype.itemsize, page_size)
        lack = lack_of_plan(plan, fast=backend == "auto")
        lack = lack or lack_of_run(Brought(variant.kv_dtype.itemsize, features.direct, features.rope, mapped=True))
    if lack is not None and backend == "fa3":
        raise NotImplementedError(f"backend: expected {lack} for 'fa3', got none; use 'auto' or 'fa2'")
    smem = smem_of_capability(capability)
    tile: Tile | Sm90Tile
    if lack is None:
        kernel, tile, ctas = attention_sm90_spec(variant), SM90_TILES[dims], 1
        smem_bytes = tile.smem_bytes(*dims)
        why = "it has all that the kernel for SM90 needs"
    else:
        kernel = attention_spec(variant, smem)
        tile = choose_tile(variant.tile, *dims, variant.kv_bytes, smem.of_cta)
        ctas = ctas_per_sm(tile, *dims, variant.kv_bytes, smem.of_sm)
        smem_bytes = tile.smem_bytes(*dims, variant.kv_bytes)
        why = f"the kernel for SM90 needs {lack}"
    merge = "the last CTA of a tile, in the same kernel"
    if tile.warps_kv == 1:
        merge = f"{merge_spec(variant, smem).name}, after it"
    return {
        "kernel": kernel.name,
        "source": f"core_kernels/device/{kernel.source}",
        "why": why,
        "tile": f"{tile.rows} packed rows (token * group + head in group), {tile.warps_kv} x {tile.block_keys} keys at "
        f"a time, {tile.stages} {'stage' if tile.stages == 1 else 'stages'}",
        "CTA": f"{tile.threads} threads, {smem_bytes / 1024:.1f} KiB of shared memory, {ctas} an SM",
        "merges": merge,
    }
