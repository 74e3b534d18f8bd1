"""Layers that share page tables: from an engine's arrays to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flashinfer_core.attention.memory import PlanMemory
from flashinfer_core.attention.plan import AttentionPlan
from flashinfer_core.attention.tiles import tile_name
from flashinfer_core.engine.layers import CascadePlan, Layer
from flashinfer_core.engine.support import LOOKS_BACK

_KEPT_PLANS = 256  # of a group: an engine has one for each number of requests


@dataclass(eq=False)
class LayerGroup:
    """Layers that share a batch's plan: same heads, same head sizes, same pages.

    On a GPU its plans share memory: of those made on it the last one may run.

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
    kv_dtype : torch.dtype or None
        Of the cache on a GPU, or of as many bytes; the work is cut accordingly. None: 16 bits.
    batch_invariant : bool
        Whether a request's result must not depend, bit for bit, on the others of its batch; on a GPU nor on how its
        query rows are spread over batches.
    max_requests : int
        The most requests of a batch on a GPU. 0: unknown, and then no CUDA graph may be captured.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    window_left: int
    looks_back: bool
    kv_dtype: torch.dtype | None = None
    batch_invariant: bool = False
    max_requests: int = 0
    _plans: dict[tuple[object, ...], AttentionPlan] = field(default_factory=dict, init=False, repr=False)
    _memory: dict[str, PlanMemory] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, layers: Sequence[Layer], *, head_dim_qk: int, head_dim_vo: int, **options: Any) -> LayerGroup:
        """Group `layers`, of the given head sizes; `options` are ``kv_dtype``, ``batch_invariant``, ``max_requests``.

        Raises
        ------
        ValueError
            If there are none, or they differ in their numbers of heads.
        NotImplementedError
            If results are not to depend on the batch and a layer has a window.
        """
        heads = {(layer.num_qo_heads, layer.num_kv_heads) for layer in layers}
        if len(heads) != 1:
            raise ValueError(f"layers: expected one pair of (query heads, KV heads) in a group, got {sorted(heads)}")
        windows = {layer.window_left for layer in layers}
        if options.get("batch_invariant") and windows != {-1}:
            raise NotImplementedError(
                "batch_invariant: expected layers without a sliding window, since the first key of a window, and with "
                f"it the order of sums, moves with the chunks of a prompt, got windows of {sorted(windows)}"
            )
        return cls(
            *heads.pop(),
            head_dim_qk,
            head_dim_vo,
            window_left=windows.pop() if len(windows) == 1 else -1,
            looks_back=any(layer.looks_back for layer in layers),
            **options,
        )

    def plan_paged(
        self,
        qo_indptr: torch.Tensor | int,
        kv_lens: torch.Tensor,
        block_table: torch.Tensor,
        *,
        page_size: int,
        causal: bool,
        q_len: float | None = None,
        rows: torch.Tensor | None = None,
    ) -> AttentionPlan:
        """Plan a batch whose keys and values lie in an engine's paged cache.

        All arrays are on the device of the cache.

        Parameters
        ----------
        qo_indptr : torch.Tensor or int
            int32 ``[requests + 1]``: where each request's query rows begin; or how many each request has.
        kv_lens : torch.Tensor
            int32 ``[requests]``: keys of each request, those of this step included.
        block_table : torch.Tensor
            int32 ``[requests, pages]``: the page of each `page_size` tokens of a request.
        page_size : int
            Tokens of a page.
        causal : bool
            Whether a query sees only keys up to its own position.
        q_len : float or None
            About the query rows of a request, by which a GPU's kernel is chosen; None: many. Any value gives the right
            result, but it must be the same at a capture and its replays: take it from what is then the same.
        rows : torch.Tensor or None
            int32 ``[requests]``: the row of `block_table` that each request has, if not its own number.
        """
        return self._plan(qo_indptr, kv_lens, causal, q_len, page_size=page_size, block_table=block_table, rows=rows)

    def plan_ragged(self, qo_indptr: torch.Tensor, *, causal: bool, q_len: float | None = None) -> AttentionPlan:
        """Plan a batch whose keys and values are the rows beside its queries, as in an encoder without a cache.

        Parameters
        ----------
        qo_indptr : torch.Tensor
            int32 ``[requests + 1]``, on the device of the rows: where each request's rows begin.
        causal : bool
            Whether a query sees only keys up to its own position.
        q_len : float or None
            See `plan_paged`.
        """
        return self._plan(qo_indptr, None, causal, q_len, page_size=None, kv_indptr=qo_indptr)

    def plan_cascade(
        self,
        qo_indptr: torch.Tensor,
        kv_lens: torch.Tensor,
        block_table: torch.Tensor,
        *,
        page_size: int,
        num_rows: int,
        prefix_len: int,
        q_len: float | None = None,
    ) -> CascadePlan:
        """Plan a causal batch whose requests all begin with the same pages. Not for CUDA graphs.

        Parameters
        ----------
        qo_indptr, kv_lens, block_table, page_size, q_len
            See `plan_paged`.
        num_rows : int
            Query rows of all requests.
        prefix_len : int
            Keys that all requests share, all of them before the query rows: a multiple of `page_size`.
        """
        if self.looks_back or self.batch_invariant:
            raise NotImplementedError(
                "prefix_len: expected layers without windows and ALiBi, and results that may depend on the batch, in a "
                "cascade"
            )
        if prefix_len % page_size != 0:
            raise ValueError(f"prefix_len: expected a multiple of page_size {page_size}, got {prefix_len}")
        shared = torch.tensor([prefix_len], dtype=torch.int32)
        own_lens, own_pages = kv_lens - prefix_len, block_table[:, prefix_len // page_size :]
        options = self._options(q_len) | {"page_size": page_size, "device": block_table.device}
        return CascadePlan(
            AttentionPlan(num_rows, shared, block_table=block_table[:1], causal=False, **options),
            AttentionPlan(qo_indptr, own_lens, block_table=own_pages, causal=True, **options),
        )

    def _options(self, q_len: float | None) -> dict[str, Any]:
        return {
            "num_qo_heads": self.num_qo_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim_qk": self.head_dim_qk,
            "head_dim_vo": self.head_dim_vo,
            "window_left": self.window_left,
            "disable_split_kv": self.batch_invariant,
            "q_len_hint": q_len,
            "kv_dtype": self.kv_dtype,
        }

    def _plan(
        self,
        qo_indptr: torch.Tensor | int,
        kv_lens: torch.Tensor | None,
        causal: bool,
        q_len: float | None,
        **keys: Any,
    ) -> AttentionPlan:
        if self.looks_back and not causal:
            raise NotImplementedError(LOOKS_BACK)
        arrays = (qo_indptr, kv_lens, keys.get("block_table"), keys.get("rows"))
        if not any(isinstance(t, torch.Tensor) and t.is_cuda for t in arrays):
            return AttentionPlan(qo_indptr, kv_lens, causal=causal, **self._options(q_len), **keys)
        # An engine's arrays lie where they lay before: then the plan needs no more than the kernel that cuts the batch.
        places = tuple((t.data_ptr(), t.shape, t.stride()) if isinstance(t, torch.Tensor) else t for t in arrays)
        if isinstance(qo_indptr, int):
            q_len = qo_indptr
        kind = "m128" if q_len is None else tile_name(q_len * (self.num_qo_heads // self.num_kv_heads))
        key = (places, kind, causal, keys["page_size"])
        plan = self._plans.get(key)
        if plan is not None:
            plan.refresh()
            return plan
        plan = self._first_plan(qo_indptr, kv_lens, causal, q_len, kind, **keys)
        if len(self._plans) >= _KEPT_PLANS:
            del self._plans[next(iter(self._plans))]
        self._plans[key] = plan
        return plan

    def _first_plan(
        self,
        qo_indptr: torch.Tensor | int,
        kv_lens: torch.Tensor | None,
        causal: bool,
        q_len: float | None,
        kind: str,
        **keys: Any,
    ) -> AttentionPlan:
        arrays = {"qo_indptr": qo_indptr, "kv_lens": kv_lens, **keys}
        given = {name: t for name, t in arrays.items() if isinstance(t, torch.Tensor)}
        device = next(t.device for t in given.values() if not t.is_cpu)
        for name, t in given.items():
            if t.device != device:
                raise ValueError(f"{name}: expected a tensor on {device}, where the cache is, got one on {t.device}")
        requests = given["kv_lens"].shape[0] if isinstance(qo_indptr, int) else qo_indptr.shape[0] - 1
        if self.max_requests and requests > self.max_requests:
            raise ValueError(f"qo_indptr: expected at most max_requests = {self.max_requests} requests, got {requests}")
        # Each kind of tile has memory of its own, which captured runs with such tiles read.
        memory = self._memory.get(kind)
        if memory is None:
            memory = self._memory[kind] = PlanMemory(device, max_requests=self.max_requests)
        return AttentionPlan(
            qo_indptr, kv_lens, causal=causal, device=device, memory=memory, **self._options(q_len), **keys
        )
