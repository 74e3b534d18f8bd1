"""What the adapter of every serving engine needs: which settings can be served, and how a batch becomes a plan.

Imports no engine. An adapter translates its engine's words into these and hands over the tensors as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from flashinfer_core import _native
from flashinfer_core._checks import FLOAT_DTYPES
from flashinfer_core.attention.plan import MAX_HEAD_DIM, AttentionPlan

KV_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16")

# What an engine may ask of attention beyond the plain causal kind: None if it is served, else why not.
FEATURES: dict[str, str | None] = {
    "sink": None,
    "sliding_window": None,
    "non_causal": None,
    "kv_connector": None,
    "encoder_only": None,
    "cross_attention": None,
    "mla": "multi-head latent attention (MLA) is not served yet",
    "sparse": "sparse attention is not served",
    "mm_prefix": "bidirectional attention within the image tokens of a prompt is not served",
    "rswa": "reference sliding window attention (R-SWA) is not served",
    "per_head_quant_scales": "a quantized KV cache with scales per head is not served",
    "batch_invariant": "batch-invariant results are not promised yet",
    "adaptive_verification": "query lengths that differ between host and device are not served",
    "pcp": "prefill context parallelism is not served",
    "dcp": "decode context parallelism is not served",
}

LOOKS_BACK = (
    "a sliding window or ALiBi in attention that is not causal: flashinfer_core has only the forms that look back; "
    "choose another attention backend for this model"
)


def refusals(
    *,
    device_type: str,
    head_dim: int,
    dtype: torch.dtype,
    kv_cache_dtype: str | None,
    features: Iterable[str],
) -> list[str]:
    """Say why a configuration cannot be served.

    Parameters
    ----------
    device_type : str
        Where the engine runs, as in ``torch.device.type``.
    head_dim : int
        Elements of a query or key head.
    dtype : torch.dtype
        Type of queries and of the model's activations.
    kv_cache_dtype : str or None
        The engine's setting; ``None`` and ``"auto"`` mean the model's own type.
    features : iterable of str
        What else is asked for: keys of `FEATURES`. An unknown one is refused, so that what a later engine release adds
        is never ignored.

    Returns
    -------
    list of str
        One reason each; empty when the configuration can be served.
    """
    reasons = []
    if device_type != "cpu":
        reasons.append(
            f"device type {device_type!r}: this version of flashinfer_core serves on CPU only; leave the attention "
            "backend unset on this device"
        )
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        reasons.append(f"head size {head_dim}: expected 1 to {MAX_HEAD_DIM}")
    if dtype not in FLOAT_DTYPES:
        reasons.append(f"dtype {dtype}: expected float32, float16 or bfloat16; choose one of them as the model's dtype")
    if kv_cache_dtype is not None and kv_cache_dtype not in KV_CACHE_DTYPES:
        reasons.append(
            f"KV-cache dtype {kv_cache_dtype!r}: expected one of {', '.join(KV_CACHE_DTYPES)}; quantized caches are "
            "not served, choose one of these"
        )
    for name in features:
        reason = FEATURES.get(name, f"{name}: flashinfer_core does not know this feature")
        if reason is not None:
            reasons.append(reason)
    return reasons


def kernels_in_use() -> str:
    """Return the release and the instruction set of the kernels, for the line that says which backend serves."""
    return f"flashinfer_core {version('flashinfer-core')}, {_native.cpu_isa()} kernels"


class Layer:
    """The arguments of `AttentionPlan.run` that belong to one attention layer, fixed when the engine builds it.

    Parameters
    ----------
    num_qo_heads, num_kv_heads : int
        Heads of this worker's share of the layer.
    sm_scale : float
        Factor of the logits.
    logits_soft_cap : float or None
        ``cap * tanh(logit / cap)``; ``None`` or 0 for none.
    window_left : int
        Keys before its own position that a query sees; -1 for all.
    alibi_slopes : sequence of float or None
        One slope a query head.
    sinks : torch.Tensor or None
        ``[num_qo_heads]``, one more logit in each head's softmax. Read at every run: engines load it later.
    bidirectional : bool
        Whether queries see the keys after them too, as in an encoder.

    Raises
    ------
    ValueError
        If the heads cannot be grouped, or slopes or sinks are not one a head.
    NotImplementedError
        If a window or ALiBi is asked for in both directions.
    """

    def __init__(
        self,
        *,
        num_qo_heads: int,
        num_kv_heads: int,
        sm_scale: float,
        logits_soft_cap: float | None = None,
        window_left: int = -1,
        alibi_slopes: Sequence[float] | None = None,
        sinks: torch.Tensor | None = None,
        bidirectional: bool = False,
    ) -> None:
        if num_qo_heads % num_kv_heads != 0:
            raise ValueError(f"num_qo_heads: expected a multiple of num_kv_heads {num_kv_heads}, got {num_qo_heads}")
        for name, length in (
            ("alibi_slopes", None if alibi_slopes is None else len(alibi_slopes)),
            ("sinks", None if sinks is None else sinks.shape[0]),
        ):
            if length is not None and length != num_qo_heads:
                raise ValueError(f"{name}: expected one value for each of {num_qo_heads} query heads, got {length}")
        self.looks_back = window_left >= 0 or alibi_slopes is not None
        if bidirectional and self.looks_back:
            raise NotImplementedError(LOOKS_BACK)
        self.num_qo_heads = num_qo_heads
        self.num_kv_heads = num_kv_heads
        self.sm_scale = float(sm_scale)
        self.logits_soft_cap = float(logits_soft_cap or 0.0)
        self.window_left = window_left
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sinks = sinks

    def run(self, plan: AttentionPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """Attend as `plan` says, with this layer's arguments, into the planned rows of `out`."""
        plan.run(
            q,
            k,
            v,
            out,
            sm_scale=self.sm_scale,
            logits_soft_cap=self.logits_soft_cap,
            window_left=self.window_left,
            alibi_slopes=self.alibi_slopes,
            sinks=None if self.sinks is None else self.sinks.float(),
        )


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share a batch's plan: same heads, same head sizes, same pages.

    Parameters
    ----------
    num_qo_heads, num_kv_heads : int
        Heads of each layer.
    head_dim_qk, head_dim_vo : int
        Elements of a key head and of a value head.
    window_left : int
        The window that all the layers have, else -1: the plan then leaves it to each layer's run.
    looks_back : bool
        Whether a layer has a window or ALiBi, which need causal attention.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    window_left: int
    looks_back: bool

    @classmethod
    def of(cls, layers: Sequence[Layer], *, head_dim_qk: int, head_dim_vo: int) -> LayerGroup:
        """Group `layers`, of the given head sizes.

        Raises
        ------
        ValueError
            If there are none, or they differ in their numbers of heads.
        """
        heads = {(layer.num_qo_heads, layer.num_kv_heads) for layer in layers}
        if len(heads) != 1:
            raise ValueError(f"layers: expected one pair of (query heads, KV heads) in a group, got {sorted(heads)}")
        windows = {layer.window_left for layer in layers}
        return cls(
            *heads.pop(),
            head_dim_qk,
            head_dim_vo,
            window_left=windows.pop() if len(windows) == 1 else -1,
            looks_back=any(layer.looks_back for layer in layers),
        )

    def plan_paged(
        self, qo_indptr: torch.Tensor, kv_lens: torch.Tensor, block_table: torch.Tensor, *, page_size: int, causal: bool
    ) -> AttentionPlan:
        """Plan a batch whose keys and values lie in an engine's paged cache.

        Parameters
        ----------
        qo_indptr : torch.Tensor
            int32 ``[requests + 1]``, on the CPU: where each request's query rows begin.
        kv_lens : torch.Tensor
            int32 ``[requests]``, on the CPU: keys of each request, those of this step included.
        block_table : torch.Tensor
            int32 ``[requests, pages]``: the page of each `page_size` tokens of a request.
        page_size : int
            Tokens of a page.
        causal : bool
            Whether a query sees only keys up to its own position.
        """
        return self._plan(qo_indptr, kv_lens, causal, page_size=page_size, block_table=block_table)

    def plan_ragged(self, qo_indptr: torch.Tensor, *, causal: bool) -> AttentionPlan:
        """Plan a batch whose keys and values are the rows beside its queries, as in an encoder without a cache.

        Parameters
        ----------
        qo_indptr : torch.Tensor
            int32 ``[requests + 1]``, on the CPU: where each request's rows begin.
        causal : bool
            Whether a query sees only keys up to its own position.
        """
        return self._plan(qo_indptr, None, causal, page_size=None, kv_indptr=qo_indptr)

    def _plan(self, qo_indptr: torch.Tensor, kv_lens: torch.Tensor | None, causal: bool, **pages: Any) -> AttentionPlan:
        if self.looks_back and not causal:
            raise NotImplementedError(LOOKS_BACK)
        return AttentionPlan(
            qo_indptr,
            kv_lens,
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim_qk=self.head_dim_qk,
            head_dim_vo=self.head_dim_vo,
            causal=causal,
            window_left=self.window_left,
            **pages,
        )
