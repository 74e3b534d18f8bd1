"""One attention layer: what belongs to it alone, and its run of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashinfer_core._page import run_write_kv_slots
from flashinfer_core.attention.options import Scale, join_scales
from flashinfer_core.attention.plan import AttentionPlan
from flashinfer_core.cascade import merge_state_in_place
from flashinfer_core.engine.support import LOOKS_BACK
from flashinfer_core.page import check_kv_slots


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
        ``[num_qo_heads]``, one more logit in each head's softmax. Engines load its values later: see `place`.
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
        self._placed = False
        self._copies: dict[str, torch.Tensor] = {}
        self._alibi_slopes: torch.Tensor | None = None
        self._sinks: torch.Tensor | None = None
        self._written: tuple[object, ...] = ()  # what the last `write` was given, as far as it was checked
        self._kept: tuple[object, ...] = ()  # whose ids are in it
        self._scales: tuple[float, torch.Tensor | None, float, torch.Tensor | None]  # of its keys and values

    def place(self, device: torch.device) -> None:
        """Bring slopes and sinks to where the layer runs, as float32.

        To be called when the weights are loaded, and again when they are loaded anew; what captured graphs read stays
        in its place. The first `run` does it otherwise.
        """
        self._alibi_slopes = self._float32_on(device, "alibi_slopes")
        self._sinks = self._float32_on(device, "sinks")
        self._placed = True

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        k_scale: Scale = None,
        v_scale: Scale = None,
    ) -> None:
        """Write keys and values to slots of the layer's cache, as `write_kv_slots` does.

        Its checks, which cost more than the rest, are made only for tensors that are not like those of the last call.
        """
        kept = (k_cache, v_cache, k_scale, v_scale)
        alike = (
            key.shape, key.stride(), key.dtype, key.device, value.shape, value.stride(), value.dtype, value.device,
            slot_mapping.shape, slot_mapping.dtype, slot_mapping.device, *map(id, kept),
        )  # fmt: skip
        if alike != self._written:
            self._scales = check_kv_slots(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale)
            self._written, self._kept = alike, kept
        run_write_kv_slots(key, value, k_cache, v_cache, slot_mapping, *self._scales)

    def _float32_on(self, device: torch.device, name: str) -> torch.Tensor | None:
        """Return a tensor as float32 on a device: itself if it is that, else a copy, where the one before was."""
        t: torch.Tensor | None = getattr(self, name)
        if t is None or (t.dtype == torch.float32 and t.device == device):
            return t
        copy = self._copies.get(name)
        if copy is None or copy.device != device or copy.shape != t.shape:
            copy = self._copies[name] = torch.empty_like(t, dtype=torch.float32, device=device)
        return copy.copy_(t)

    def run(
        self,
        plan: AttentionPlan | CascadePlan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        *,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
    ) -> None:
        """Attend as `plan` says, with this layer's arguments, into the planned rows of `out`.

        The scales are those of quantized queries, keys and values: numbers, or tensors of one element, which a GPU's
        kernels read there.
        """
        if not self._placed:
            self.place(q.device)
        logits_factor, v_factor, gpu_scales = join_scales((q_scale, k_scale, v_scale, None))
        plan.run(
            q,
            k,
            v,
            out,
            sm_scale=self.sm_scale * logits_factor,
            logits_soft_cap=self.logits_soft_cap,
            window_left=self.window_left,
            v_scale=v_factor,
            alibi_slopes=self._alibi_slopes,
            sinks=self._sinks,
            gpu_scales=gpu_scales,
        )


class CascadePlan:
    """A batch whose requests begin with the same keys: those are read once for all, the rest for each request.

    Parameters
    ----------
    prefix : AttentionPlan
        All query rows, as one request, on the keys that all share.
    rest : AttentionPlan
        Each request on its other keys.
    """

    def __init__(self, prefix: AttentionPlan, rest: AttentionPlan) -> None:
        self._prefix, self._rest = prefix, rest
        self._states: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None,
        **options: Any,
    ) -> None:
        """Do what `AttentionPlan.run` does, whose options these are."""
        if self._states is None:  # the layers of a step come one after the other
            lse = out.new_empty(out.shape[:2], dtype=torch.float32)
            self._states = lse, torch.empty_like(out), torch.empty_like(lse)
        lse, shared, shared_lse = self._states
        self._rest.run(q, k, v, out, lse, sinks=sinks, **options)  # a sink counts once
        self._prefix.run(q, k, v, shared, shared_lse, **options)
        merge_state_in_place(out, lse, shared, shared_lse)
