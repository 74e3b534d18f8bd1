"""What the batch wrappers have in common: a plan made once, and runs of it.

A wrapper's `plan` fixes lengths, page tables, masks, options and dtypes; `run` brings tensors and scales. The wrappers
differ in how `plan` describes the keys (`decode.py`, `prefill.py`, `ragged.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flashinfer_core._checks import (
    FLOAT_DTYPES,
    FP8_DTYPES,
    KV_LAYOUTS,
    check_choice,
    check_int,
    check_tensor,
    refuse,
    split_paged_kv_cache,
)
from flashinfer_core.attention.arrays import ArgumentNames, Buffer
from flashinfer_core.attention.deferred import DeferredPlan
from flashinfer_core.attention.kernels import Q_DTYPES
from flashinfer_core.attention.layout import Cache, Layout, Signature, addresses_of, check_device, signature_of
from flashinfer_core.attention.lengths import Lengths, check_bound
from flashinfer_core.attention.masks import packed_mask
from flashinfer_core.attention.memory import PlanMemory
from flashinfer_core.attention.operators import attention_wrapper_run, register
from flashinfer_core.attention.options import (
    AttentionOptions,
    DType,
    Scale,
    check_backend,
    dtype_of,
    join_scales,
)
from flashinfer_core.attention.plan import AttentionPlan

LN_2 = 0.6931471805599453
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class AttentionWrapper:
    """State and run of a planned batch; the base of the public wrappers, which know how a cache is split into K and V.

    Parameters
    ----------
    float_workspace_buffer
        Tensor whose device is the wrapper's device; None: the device is that of the arrays of `plan`, or if they are in
        host memory that of the tensors of `run`. On a GPU it holds partial results if it is large enough
        (`workspace_size`), else the wrapper allocates memory for them; the little that it needs besides it allocates in
        any case. The CPU kernels use none of it.
    kv_layout
        ``"NHD"`` or ``"HND"``.
    use_cuda_graph
        Fix the batch size and keep lengths and page table in the buffers given, which `plan` then overwrites: a
        captured `run` replays with what the last `plan` wrote. The first `plan` must precede the capture.
    backend
        ``"auto"`` for the best there is; ``"fa2"`` for the CUDA kernel of all GPUs; ``"fa3"`` for that of SM90, which
        is refused where it does not apply.
    jit_args, jit_kwargs
        Custom CUDA variants, which this version does not have: only ``None``.
    buffers
        The caller's buffers, by the members of `ArgumentNames`.
    """

    _kv_name = "paged_kv_cache"  # for error messages

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor | None,
        kv_layout: str,
        use_cuda_graph: bool,
        backend: str,
        jit_args: object,
        jit_kwargs: object,
        buffers: Mapping[str, Buffer],
    ) -> None:
        if float_workspace_buffer is not None:
            check_tensor("float_workspace_buffer", float_workspace_buffer, dtypes=None)
        self._workspace = float_workspace_buffer
        self._device = None if float_workspace_buffer is None else float_workspace_buffer.device
        check_choice("kv_layout", kv_layout, KV_LAYOUTS)
        check_backend(backend, self._device)
        refuse("jit_args", jit_args, None, "custom CUDA variants are not in this version")
        refuse("jit_kwargs", jit_kwargs, None, "custom CUDA variants are not in this version")
        self._kv_layout = kv_layout
        self._use_cuda_graph = use_cuda_graph
        self._backend = backend
        self._buffers = dict(buffers) if use_cuda_graph else None
        for name, buffer, _ in buffers.values() if use_cuda_graph else ():
            if buffer is not None:
                check_tensor(name, buffer, dtypes=(torch.int32,), ndim=1, last_dim_contiguous=True)
                check_device(name, buffer, buffer.device if self._device is None else self._device)
        self._handle = register(self)
        self._memory: PlanMemory | None = None
        self._custom_mask_buf: torch.Tensor | None = None
        self._mask_indptr_buf: torch.Tensor | None = None
        self._plan: AttentionPlan | None = None
        self._run_device = torch.device("cpu")  # of the tensors that a deferred plan is made for
        self._deferred: DeferredPlan | None = None
        self._kv_cache: object = None
        self._options = AttentionOptions()
        self._q_dtype = self._kv_dtype = self._o_dtype = torch.float16
        self._num_qo_heads = self._head_dim_vo = 0
        self._mask: torch.Tensor | None = None
        self._mask_indptr: torch.Tensor | None = None
        self._most_keys: int | None = None
        self._kept_tables: dict[int, torch.Tensor] = {}

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the batch size is fixed and the page table lives in buffers of the caller."""
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Replace the workspace from the next `plan` on; the second one is only checked, since no wrapper needs it."""
        check_tensor("float_workspace_buffer", float_workspace_buffer, dtypes=None)
        if int_workspace_buffer is not None:
            check_tensor("int_workspace_buffer", int_workspace_buffer, dtypes=None)
        if self._device is not None:
            check_device("float_workspace_buffer", float_workspace_buffer, self._device)
        self._workspace = float_workspace_buffer
        if self._memory is not None:
            self._memory.workspace = float_workspace_buffer

    def end_forward(self) -> None:
        """Forget the cache that `begin_forward` was given."""
        self._kv_cache = None

    def _set(
        self,
        qo_indptr: torch.Tensor | int,
        keys: Mapping[str, torch.Tensor | None],
        *,
        options: AttentionOptions,
        dtypes: tuple[DType, DType | None, DType | None],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None,
        page_size: int | None,
        fixed_split_size: int | None,
        disable_split_kv: bool,
        names: ArgumentNames,
        lengths: Lengths,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        max_rows: int | None = None,
    ) -> None:
        """Make the plan. Nothing of the previous one stays, even if this one is refused."""
        self._plan = None
        device = self._device or gpu_of(qo_indptr, *keys.values()) or self._run_device
        check_backend(self._backend, device)
        on_gpu = device.type == "cuda"
        q_dtype = dtype_of("q_data_type", dtypes[0], Q_DTYPES if on_gpu else FLOAT_DTYPES)
        kv_dtypes = (q_dtype, *FP8_DTYPES) if on_gpu else FLOAT_DTYPES
        kv_dtype = q_dtype if dtypes[1] is None else dtype_of("kv_data_type", dtypes[1], kv_dtypes)
        o_dtype = q_dtype if dtypes[2] is None else dtype_of("o_data_type", dtypes[2])
        if on_gpu and (self._memory is None or self._memory.device != device):
            self._memory = PlanMemory(device, self._buffers, self._workspace)
        plan = AttentionPlan(
            qo_indptr,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=head_dim_qk,
            head_dim_vo=head_dim_vo,
            page_size=page_size,
            causal=options.causal,
            window_left=options.window_left,
            fixed_split_size=tokens_of_split(fixed_split_size, page_size or 1),
            disable_split_kv=disable_split_kv,
            names=names,
            device=device,
            buffers=self._buffers,
            memory=self._memory,
            q_len_hint=lengths.q_len_hint,
            kv_dtype=kv_dtype,
            backend=self._backend,
            **keys,
        )
        lengths.check(plan)
        if max_rows is not None and plan.num_queries is not None:
            check_bound("max_total_num_rows", max_rows, [plan.num_queries])
        mask, mask_indptr = packed_mask(custom_mask, packed_custom_mask, plan.arrays, plan.device)
        if self._use_cuda_graph and mask is not None and mask_indptr is not None:
            mask = Buffer("custom_mask_buf", self._custom_mask_buf, exact=False).fill(mask)
            Buffer("mask_indptr_buf", self._mask_indptr_buf).fill(mask_indptr)
            if self._memory is not None:  # the kernels read int64
                held = self._memory.pool.reserve("mask_indptr", mask_indptr.numel(), torch.int64)
                mask_indptr = Buffer("mask_indptr", held).fill(mask_indptr)
        self._q_dtype, self._kv_dtype, self._o_dtype = q_dtype, kv_dtype, o_dtype
        self._num_qo_heads, self._head_dim_vo = plan.num_qo_heads, plan.head_dim_vo
        self._mask, self._mask_indptr = mask, mask_indptr
        self._options = options
        self._most_keys = lengths.max_sequence_kv
        self._plan = plan

    def _tables(
        self, options: AttentionOptions, num_rows: int, num_pages: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the slopes of ALIBI, and the rotations of ROPE_LLAMA for as many positions as a request can have."""
        plan = self._plan
        assert plan is not None
        # What a captured graph reads must do for later plans too.
        lens = None if self._use_cuda_graph else plan.kv_lens
        if lens is None:
            most = min(plan.arrays.capacity, num_pages * (plan.page_size or 1))
            most = most if self._most_keys is None else min(most, self._most_keys)
        else:
            most = max(lens, default=0)
        alibi = options.alibi(plan.num_qo_heads, plan.device)
        rope = options.rope_table(plan.head_dim_qk, max(most, num_rows, 1), plan.device)
        if self._use_cuda_graph:
            self._kept_tables |= {id(table): table for table in (alibi, rope) if table is not None}
        return alibi, rope

    def _execute(
        self,
        q: torch.Tensor,
        cache: Cache,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        o_scale: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        overrides: dict[str, Any] | None = None,
    ) -> Result:
        """Allocate results and attend; `overrides` replace options of the plan, as in `AttentionOptions.override`."""
        if not isinstance(q, torch.Tensor) or q.dim() != 3:
            check_tensor("q", q, dtypes=None, ndim=3)
        if self._plan is None:
            self._complete_plan(q, cache)
        shape = (q.shape[0], self._num_qo_heads, self._head_dim_vo)
        given = out is not None
        if out is None:
            out = torch.empty(shape, dtype=self._o_dtype, device=q.device)
        by_token = None
        if return_lse:
            check_choice("lse_base", lse_base, ("log2", "ln"))
            check_choice("lse_layout", lse_layout, ("NH", "HN"))
            lse_shape = shape[:2] if lse_layout == "NH" else (shape[1], shape[0])
            if lse is None:
                lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
            else:
                check_tensor("lse", lse, dtypes=(torch.float32,), shape=lse_shape, writable=True)
            by_token = lse if lse_layout == "NH" else lse.transpose(0, 1)
        scales = (q_scale, k_scale, v_scale, o_scale)
        if torch.compiler.is_compiling():
            attention_wrapper_run(self._handle, q, cache, out, by_token, scales, window_left, sinks, overrides)
        else:
            self._attend(q, cache, out, by_token, scales, window_left, sinks, overrides, given)
        if not return_lse:
            return out
        assert lse is not None
        if lse_base == "ln":
            lse.mul_(LN_2)
        return out, lse

    def _complete_plan(self, q: torch.Tensor, cache: Cache) -> None:
        """Make the plan that waits for the tensors of its first run."""
        if self._deferred is None:
            raise RuntimeError(f"{type(self).__name__}.run: call plan() first")
        self._run_device = q.device
        self._deferred.complete(self, q, *self._split(cache))

    def _attend(
        self,
        q: torch.Tensor,
        cache: Cache,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        scales: tuple[Scale, Scale, Scale, Scale],
        window_left: int | None,
        sinks: torch.Tensor | None,
        overrides: dict[str, Any] | None,
        out_given: bool = True,
    ) -> None:
        """Run the plan with scales of q, k, v and the output; also the body of the operator in compiled graphs."""
        plan, options = self._plan, self._options
        if plan is None:
            raise RuntimeError(f"{type(self).__name__}.run: call plan() first")
        if overrides:
            options = options.override(**overrides)
            window_left = options.window_left
        layout = plan.layout
        signature = signature_of(q, cache, out if out_given else None)
        if layout is None or layout.signature != signature:
            layout = self._check(plan, q, cache, out, out_given, signature)
        sm_scale, v_factor, gpu_scales = join_scales(scales)
        alibi = rope = None
        if options.pos_encoding_mode != "NONE":
            alibi, rope = self._tables(options, q.shape[0], layout.num_pages)
        plan.run_checked(
            layout, q.data_ptr(), *addresses_of(cache, layout), out.data_ptr(), lse,
            options.scale(plan.head_dim_qk) * sm_scale, options.logits_soft_cap, options.causal, window_left, v_factor,
            alibi, sinks, self._mask, self._mask_indptr, rope, gpu_scales,
        )  # fmt: skip

    def _check(
        self,
        plan: AttentionPlan,
        q: torch.Tensor,
        cache: Cache,
        out: torch.Tensor,
        out_given: bool,
        signature: Signature,
    ) -> Layout:
        """Check the tensors of a run against what was planned and return their layout."""
        k, v = self._split(cache)
        if out_given:
            shape = (q.shape[0], self._num_qo_heads, self._head_dim_vo)
            check_tensor("out", out, dtypes=(self._o_dtype,), shape=shape, last_dim_contiguous=True, writable=True)
        if q.dtype != self._q_dtype:
            raise ValueError(f"q: expected dtype {self._q_dtype}, the q_data_type of plan(), got {q.dtype}")
        if k.dtype != self._kv_dtype:
            raise ValueError(
                f"{self._kv_name}: expected dtype {self._kv_dtype}, the kv_data_type of plan(), got {k.dtype}"
            )
        if plan.num_queries is not None and q.shape[0] != plan.num_queries:
            raise ValueError(f"q: expected {plan.num_queries} tokens, as planned, got shape {list(q.shape)}")
        return plan.check_layout(q, k, v, out, signature, self._kv_name)

    def _split(self, cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V with tokens before heads."""
        raise NotImplementedError

    def _no_workspace(self, *arguments: object) -> torch.Tensor:
        """Return an empty workspace on the wrapper's device, or where arguments of `plan` are."""
        return torch.empty(0, dtype=torch.uint8, device=self._device or gpu_of(*arguments) or "cpu")

    def _workspace_bytes(self) -> tuple[int, int]:
        """Return the bytes of the memory for partial results, and of all else, that the plan takes from a GPU."""
        return (0, 0) if self._memory is None else self._memory.bytes()


class PagedAttentionWrapper(AttentionWrapper):
    """What decode and prefill over a paged KV cache share."""

    @property
    def resolved_backend(self) -> str:
        """The implementation that runs the plan: "cpu", "fa2", or "fa3" if the tensors let it; "auto" before it."""
        if self._plan is None:
            return "cpu" if self._device is None or self._device.type == "cpu" else self._backend
        return self._plan.backend

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Do nothing: one kernel serves K and V of any strides."""
        check_choice("variant", variant, ("independent", "shared"))

    def _split(self, cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
        return split_paged_kv_cache(self._kv_name, cache, self._kv_layout)


def refuse_kernel_options(**options: object) -> None:
    """Refuse keywords that select kernels or quantized caches of FlashInfer's; None and False select nothing."""
    for name, value in options.items():
        if value is not None and value is not False:
            refuse(name, value, None, "no kernel of this version has it")


def tokens_of_split(fixed_split_size: int | None, page_size: int) -> int | None:
    """Return the keys of a fixed split given in pages; None and -1 mean none."""
    if fixed_split_size is None or fixed_split_size == -1:
        return None
    return check_int("fixed_split_size", fixed_split_size, 1) * page_size


def refuse_positional(args: tuple[Any, ...]) -> None:
    """Refuse positional arguments that only custom CUDA variants take."""
    raise NotImplementedError(
        f"run: {len(args)} extra positional arguments belong to custom CUDA variants, which are not in this version"
    )


def gpu_of(*arrays: object) -> torch.device | None:
    """Return the GPU of the first array that is on one."""
    return next((t.device for t in arrays if isinstance(t, torch.Tensor) and not t.is_cpu), None)
