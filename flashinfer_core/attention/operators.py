"""Attention inside of compiled graphs: operators that stand for a run of a plan, of a wrapper, or of one request.

A graph cannot hold a plan, and must not hold what the next plan changes. It holds the number of a plan or wrapper, by
which the operator finds it when the graph runs: a wrapper may then be planned anew between two runs of one graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch

from flashinfer_core._ops import native_op

_owners: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = itertools.count(2)  # graphs are specialized for 0 and 1

_RESULTS = "Tensor(a!) out, Tensor(b!)? lse"
Scale = float | torch.Tensor | None


def register(owner: object) -> int:
    """Return a number for an object, under which the operators find it while it lives."""
    number = next(_numbers)
    _owners[number] = owner
    return number


def _owner(handle: int) -> Any:
    owner = _owners.get(handle)
    if owner is None:
        raise RuntimeError("run: expected the plan or wrapper that the graph was compiled with, but it is gone")
    return owner


@native_op(
    f"SymInt handle, Tensor q, Tensor k, Tensor v, {_RESULTS}, float sm_scale, float logits_soft_cap, bool? causal, "
    "int? window_left, float v_scale, Tensor? alibi_slopes, Tensor? sinks, Tensor? custom_mask, Tensor? mask_indptr, "
    "Tensor? rope_cos_sin, Tensor?[] gpu_scales, str kv_name"
)
def attention_plan_run(
    handle: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sm_scale: float,
    logits_soft_cap: float,
    causal: bool | None,
    window_left: int | None,
    v_scale: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    custom_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    rope_cos_sin: torch.Tensor | None,
    gpu_scales: Sequence[torch.Tensor | None],
    kv_name: str,
) -> None:
    """`AttentionPlan.run`."""
    _owner(handle).run(
        q,
        k,
        v,
        out,
        lse,
        sm_scale=sm_scale,
        logits_soft_cap=logits_soft_cap,
        causal=causal,
        window_left=window_left,
        v_scale=v_scale,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        custom_mask=custom_mask,
        mask_indptr=mask_indptr,
        rope_cos_sin=rope_cos_sin,
        gpu_scales=tuple(gpu_scales),
        kv_name=kv_name,
    )


def attention_wrapper_run(
    handle: int,
    q: torch.Tensor,
    cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scales: tuple[Scale, ...],
    window_left: int | None,
    sinks: torch.Tensor | None,
    overrides: dict[str, Any] | None,
) -> None:
    """`AttentionWrapper._attend` in a graph."""
    options = dict(overrides or {})
    forward_window_left = options.pop("window_left", -1)
    _attention_wrapper_run(
        handle, q, [cache] if isinstance(cache, torch.Tensor) else list(cache), out, lse, *separate(scales),
        window_left, sinks, overrides is not None, forward_window_left, **options,
    )  # fmt: skip


def separate(scales: Sequence[Scale]) -> tuple[list[float], list[torch.Tensor | None]]:
    """Return scales as an operator takes them: as factors, and as tensors that are used in place of them."""
    factors = [1.0 if scale is None or isinstance(scale, torch.Tensor) else scale for scale in scales]
    return factors, [scale if isinstance(scale, torch.Tensor) else None for scale in scales]


def joined(factors: Sequence[float], tensors: Sequence[torch.Tensor | None]) -> tuple[Scale, ...]:
    """Return the scales that `separate` was given."""
    return tuple(factor if t is None else t for factor, t in zip(factors, tensors, strict=True))


@native_op(
    f"SymInt handle, Tensor q, Tensor[] cache, {_RESULTS}, float[] factors, Tensor?[] scales, int? window_left, "
    "Tensor? sinks, bool overridden, int forward_window_left, bool causal=False, str pos_encoding_mode='NONE', "
    "float? logits_soft_cap=None, float? sm_scale=None, float? rope_scale=None, float? rope_theta=None"
)
def _attention_wrapper_run(
    handle: int,
    q: torch.Tensor,
    cache: Sequence[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor | None,
    factors: list[float],
    scales: Sequence[torch.Tensor | None],
    window_left: int | None,
    sinks: torch.Tensor | None,
    overridden: bool,
    forward_window_left: int,
    causal: bool = False,
    pos_encoding_mode: str = "NONE",
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
) -> None:
    overrides = {
        "causal": causal,
        "pos_encoding_mode": pos_encoding_mode,
        "window_left": forward_window_left,
        "logits_soft_cap": logits_soft_cap,
        "sm_scale": sm_scale,
        "rope_scale": rope_scale,
        "rope_theta": rope_theta,
    }
    _owner(handle)._attend(
        q,
        cache[0] if len(cache) == 1 else tuple(cache),
        out,
        lse,
        joined(factors, scales),
        window_left,
        sinks,
        overrides if overridden else None,
    )
