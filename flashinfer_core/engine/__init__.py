"""What the adapter of every serving engine needs: which settings can be served, and how a batch becomes a plan.

Imports no engine. An adapter translates its engine's words into these and hands over the tensors as they are:

* `refusals` when the engine chooses the backend, `cache_dtype` for the view of a quantized cache;
* one `Layer` for each attention layer, `Layer.place` once its weights are loaded;
* one `LayerGroup` for layers that share page tables, and in each step one `LayerGroup.plan_paged` (or `plan_ragged`,
  `plan_cascade`) and a `Layer.run` for each layer.

On a GPU nothing here waits for it. Captured CUDA graphs hold the runs and not the plan: before each replay the adapter
plans the batch as it did before the capture, and the replay finds the new lengths and pages. Three things must then be
as they were at the capture, and engines that pad batches to captured sizes do keep them so: the number of requests,
padded by requests without query rows; ``q_len``; and the place of the block table.
"""

from flashinfer_core.engine.groups import LayerGroup
from flashinfer_core.engine.layers import CascadePlan, Layer
from flashinfer_core.engine.support import (
    FEATURES,
    KV_CACHE_DTYPES,
    LOOKS_BACK,
    cache_dtype,
    kernels_in_use,
    refusals,
)

__all__ = [
    "FEATURES",
    "KV_CACHE_DTYPES",
    "LOOKS_BACK",
    "CascadePlan",
    "Layer",
    "LayerGroup",
    "cache_dtype",
    "kernels_in_use",
    "refusals",
]
