"""What the batch wrappers have in common: a plan made once, and runs of it.

A wrapper's `plan` fixes lengths, page tables, masks, options and dtypes; `run` brings tensors and scales. The wrappers
differ in how `plan` describes the keys (`decode.py`, `prefill.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashinfer_core._checks import (
    KV_LAYOUTS,
    check_choice,
    check_int,
    check_tensor,
    refuse,
    split_paged_kv_cache,
)
from flashinfer_core.attention.options import (
    AttentionOptions,
    DType,
    Scale,
    check_backend,
    dtype_of,
    packed_mask,
    scalar,
)
from flashinfer_core.attention.plan import AttentionPlan

LN_2 = 0.6931471805599453
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class QueryLengths:
    """Where each request's query rows are, with what else the caller said of their numbers."""

    qo_indptr: torch.Tensor
    seq_lens_q: torch.Tensor | None = None
    max_token_per_sequence: int | None = None
    uniform_q_len: int | None = None

    def check(self) -> None:
        """Raise where the statements differ."""
        if self.seq_lens_q is None and self.max_token_per_sequence is None and self.uniform_q_len is None:
            return
        lens = self.qo_indptr.diff().tolist()
        _check_lens("seq_lens_q", self.seq_lens_q, lens)
        check_bound("max_token_per_sequence", self.max_token_per_sequence, lens)
        if self.uniform_q_len is not None:
            check_int("uniform_q_len", self.uniform_q_len, 0)
            if any(length != self.uniform_q_len for length in lens):
                raise ValueError(
                    f"uniform_q_len: expected the length of every request, {_short(lens)}, got {self.uniform_q_len}"
                )


class AttentionWrapper:
    """State and run of a planned batch; the base of the public wrappers.

    Parameters
    ----------
    float_workspace_buffer
        uint8 tensor whose device is the wrapper's device. The CPU kernels allocate what they need themselves and use
        none of it, so any size will do.
    kv_layout
        ``"NHD"`` or ``"HND"``.
    use_cuda_graph
        Fix the batch size and keep lengths and page table in the buffers given, which `plan` then overwrites.
    backend
        ``"auto"``.
    jit_args, jit_kwargs
        Custom CUDA variants, which this version does not have: only ``None``.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        backend: str,
        jit_args: object,
        jit_kwargs: object,
    ) -> None:
        check_tensor("float_workspace_buffer", float_workspace_buffer, dtypes=None)
        check_choice("kv_layout", kv_layout, KV_LAYOUTS)
        check_backend(backend)
        refuse("jit_args", jit_args, None, "custom CUDA variants are not in this version")
        refuse("jit_kwargs", jit_kwargs, None, "custom CUDA variants are not in this version")
        self._kv_layout = kv_layout
        self._use_cuda_graph = use_cuda_graph
        self._custom_mask_buf: torch.Tensor | None = None
        self._mask_indptr_buf: torch.Tensor | None = None
        self._plan: AttentionPlan | None = None
        self._options = AttentionOptions()
        self._q_dtype = self._kv_dtype = self._o_dtype = torch.float16
        self._mask: torch.Tensor | None = None
        self._mask_indptr: torch.Tensor | None = None
        self._alibi: torch.Tensor | None = None
        self._rope: torch.Tensor | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the batch size is fixed and the page table lives in buffers of the caller."""
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Replace the workspace; the CPU kernels use none, so the tensors are only checked."""
        check_tensor("float_workspace_buffer", float_workspace_buffer, dtypes=None)
        if int_workspace_buffer is not None:
            check_tensor("int_workspace_buffer", int_workspace_buffer, dtypes=None)

    def end_forward(self) -> None:
        """Do nothing: the counterpart of `begin_forward` in older programs."""

    def _set(
        self,
        plan: AttentionPlan,
        options: AttentionOptions,
        q_data_type: DType,
        kv_data_type: DType | None,
        o_data_type: DType | None,
        *,
        lengths: QueryLengths,
        seq_lens: torch.Tensor | None = None,
        max_sequence_kv: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
    ) -> None:
        """Check what `plan` was told twice, and take over the new plan. Nothing of the previous one stays."""
        lengths.check()
        _check_lens("seq_lens", seq_lens, plan.kv_lens)
        check_bound("max_sequence_kv", max_sequence_kv, plan.kv_lens)
        mask, mask_indptr = packed_mask(custom_mask, packed_custom_mask, lengths.qo_indptr, plan.kv_lens)
        if self._use_cuda_graph and mask is not None and mask_indptr is not None:
            mask = copy_to_buffer("custom_mask_buf", self._custom_mask_buf, mask, exact=False)
            copy_to_buffer("mask_indptr_buf", self._mask_indptr_buf, mask_indptr)
        self._q_dtype = dtype_of("q_data_type", q_data_type)
        self._kv_dtype = self._q_dtype if kv_data_type is None else dtype_of("kv_data_type", kv_data_type)
        self._o_dtype = self._q_dtype if o_data_type is None else dtype_of("o_data_type", o_data_type)
        self._mask, self._mask_indptr = mask, mask_indptr
        self._options = options
        self._plan = plan
        self._alibi, self._rope = self._tables(options)

    def _tables(self, options: AttentionOptions) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        assert self._plan is not None
        positions = max([*self._plan.kv_lens, self._plan.num_queries, 1])
        return options.alibi(self._plan.num_qo_heads), options.rope_table(self._plan.head_dim_qk, positions)

    def _execute(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        out_scale: float = 1.0,
        kv_name: str = "paged_kv_cache",
        overrides: dict[str, Any] | None = None,
    ) -> Result:
        plan = self._plan
        if plan is None:
            raise RuntimeError(f"{type(self).__name__}.run: call plan() first")
        options, alibi, rope = self._options, self._alibi, self._rope
        if overrides:
            options = self._options.override(**overrides)
            alibi, rope = self._tables(options)
            window_left = options.window_left
        if not isinstance(q, torch.Tensor) or q.dim() != 3:
            check_tensor("q", q, ndim=3)
        if q.dtype != self._q_dtype:
            raise ValueError(f"q: expected dtype {self._q_dtype}, the q_data_type of plan(), got {q.dtype}")
        if k.dtype != self._kv_dtype:
            raise ValueError(f"{kv_name}: expected dtype {self._kv_dtype}, the kv_data_type of plan(), got {k.dtype}")
        shape = (q.shape[0], plan.num_qo_heads, plan.head_dim_vo)
        if q.shape[0] != plan.num_queries:
            raise ValueError(f"q: expected {plan.num_queries} tokens, as planned, got shape {list(q.shape)}")
        if out is None:
            out = torch.empty(shape, dtype=self._o_dtype, device=q.device)
        else:
            check_tensor("out", out, dtypes=(self._o_dtype,), shape=shape, last_dim_contiguous=True, writable=True)
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
        plan.run(
            q,
            k,
            v,
            out,
            by_token,
            sm_scale=options.scale(plan.head_dim_qk, q_scale, k_scale),
            logits_soft_cap=options.logits_soft_cap,
            causal=options.causal,
            window_left=window_left,
            v_scale=out_scale if v_scale is None else out_scale * scalar("v_scale", v_scale),
            alibi_slopes=alibi,
            sinks=sinks,
            custom_mask=self._mask,
            mask_indptr=self._mask_indptr,
            rope_cos_sin=rope,
            kv_name=kv_name,
        )
        if not return_lse:
            return out
        assert lse is not None
        if lse_base == "ln":
            lse.mul_(LN_2)
        return out, lse


class PagedAttentionWrapper(AttentionWrapper):
    """What decode and prefill over a paged KV cache share."""

    @property
    def resolved_backend(self) -> str:
        """The implementation that runs: "cpu"."""
        return "cpu"

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Do nothing: one CPU kernel serves K and V of any strides, and none is compiled."""
        check_choice("variant", variant, ("independent", "shared"))

    def _split(self, paged_kv_cache: object) -> tuple[torch.Tensor, torch.Tensor]:
        return split_paged_kv_cache("paged_kv_cache", paged_kv_cache, self._kv_layout)


def refuse_kernel_options(**options: object) -> None:
    """Refuse keywords that select CUDA kernels or quantized caches; None and False select nothing."""
    for name, value in options.items():
        if value is not None and value is not False:
            refuse(name, value, None, "this version has no such kernel for CPU tensors")


def tokens_of_split(fixed_split_size: int | None, page_size: int) -> int | None:
    """Return the keys of a fixed split given in pages; None and -1 mean none."""
    if fixed_split_size is None or fixed_split_size == -1:
        return None
    return check_int("fixed_split_size", fixed_split_size, 1) * page_size


def _check_lens(name: str, lens: torch.Tensor | None, planned: list[int]) -> None:
    """Raise unless lengths given beside a page table agree with it."""
    if lens is None:
        return
    check_tensor(name, lens, dtypes=(torch.int32, torch.int64), ndim=1)
    if lens.tolist() != planned:
        raise ValueError(f"{name}: expected {_short(planned)} as in the plan's arrays, got {_short(lens.tolist())}")


def check_bound(name: str, bound: int | None, lens: list[int]) -> None:
    """Raise unless an upper bound given beside the lengths holds."""
    if bound is not None and lens and max(lens) > check_int(name, bound, 0):
        raise ValueError(f"{name}: expected at least {max(lens)}, the longest request's, got {bound}")


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"


def positional(args: tuple[Any, ...]) -> None:
    """Refuse positional arguments that only custom CUDA variants take."""
    if args:
        raise NotImplementedError(
            f"run: {len(args)} extra positional arguments belong to custom CUDA variants, which are not in this version"
        )


def copy_to_buffer(name: str, buffer: torch.Tensor | None, values: torch.Tensor, exact: bool = True) -> torch.Tensor:
    """Copy planned values into the caller's fixed buffer and return the part in use.

    Parameters
    ----------
    name
        The buffer's name.
    buffer
        The buffer given at construction; ``None`` raises.
    values
        What was planned.
    exact
        Whether the buffer must have exactly as many elements.
    """
    if buffer is None:
        raise ValueError(f"{name}: expected a tensor, since use_cuda_graph is set, got None")
    size = values.numel()
    if buffer.numel() < size or (exact and buffer.numel() != size):
        what = f"{size} elements" if exact else f"at least {size} elements"
        raise ValueError(f"{name}: expected {what}, got {buffer.numel()}; the batch is fixed with use_cuda_graph")
    buffer[:size].copy_(values)
    return buffer[:size]
