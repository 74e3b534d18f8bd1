"""Which CUDA kernel an attention call runs, and why: the answer of ``flashinfer-core explain``. No GPU is asked."""

from __future__ import annotations

import torch

from flashinfer_core.attention.dispatch import Brought, Planned, lack_of_brought, lack_of_planned
from flashinfer_core.attention.kernels import Variant, kernel_of, smem_of_capability


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
    plan = Planned(capability, variant.tile, *dims, variant.kv_dtype.itemsize, page_size)
    run = Brought(variant.kv_dtype.itemsize, features.direct, features.rope, mapped=True)
    lack = lack_of_planned(backend, plan) or lack_of_brought(backend, run)
    kernel = kernel_of(variant, smem_of_capability(capability), lack is None)
    tile = kernel.tile
    return {
        "kernel": kernel.spec.name,
        "source": f"core_kernels/device/{kernel.spec.source}",
        "why": "it has all that the kernel for SM90 needs" if lack is None else f"the kernel for SM90 needs {lack}",
        "tile": f"{tile.rows} packed rows (token * group + head in group), {tile.warps_kv} x {tile.block_keys} keys at "
        f"a time, {tile.stages} {'stage' if tile.stages == 1 else 'stages'}",
        "CTA": f"{tile.threads} threads, {kernel.smem_bytes / 1024:.1f} KiB of shared memory, {kernel.ctas} an SM",
        "merges": f"{kernel.merge.name}, after it" if kernel.merge else "the last CTA of a tile, in the same kernel",
    }
