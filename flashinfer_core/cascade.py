"""Cascade attention: partial results over disjoint sets of keys, and their merging.

A state is an output ``v`` with its base-2 log-sum-exp ``s``. Merging states gives the attention over the union of
their keys (Dao et al., FlashAttention, 2022, for the blocks of one call; Ye et al., cascade inference, 2024, for a
prefix that many requests share). States without a visible key are ``(0, -infinity)`` and change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashinfer_core._checks import check_int, check_tensor
from flashinfer_core._merge import run_merge_state, run_merge_states
from flashinfer_core.attention.options import DType
from flashinfer_core.attention.prefill import BatchPrefillWithPagedKVCacheWrapper


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two states.

    Parameters
    ----------
    v_a, v_b
        ``[tokens, heads, head_dim]``, float32, float16 or bfloat16, both alike.
    s_a, s_b
        float32 ``[tokens, heads]``, base 2.

    Returns
    -------
    tuple
        The merged ``v`` and ``s``, of the same shapes.

    Raises
    ------
    ValueError
        Shapes, dtypes or devices that do not fit.
    """
    _check_state("v_a", v_a, "s_a", s_a)
    _check_state("v_b", v_b, "s_b", s_b, like=v_a)
    contiguous = torch.contiguous_format
    v, s = torch.empty_like(v_a, memory_format=contiguous), torch.empty_like(s_a, memory_format=contiguous)
    run_merge_state(v_a, s_a, v_b, s_b, v, s, None)
    return v, s


def merge_state_in_place(
    v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, mask: torch.Tensor | None = None
) -> None:
    """Merge another state into `v` and `s`.

    Parameters
    ----------
    v, v_other
        ``[tokens, heads, head_dim]``, both alike.
    s, s_other
        float32 ``[tokens, heads]``, base 2.
    mask
        bool ``[tokens]``: tokens where it is false stay as they are.

    Raises
    ------
    ValueError
        Shapes, dtypes or devices that do not fit.
    """
    _check_state("v", v, "s", s, writable=True)
    _check_state("v_other", v_other, "s_other", s_other, like=v)
    if mask is not None:
        shape, device = v.shape[:1], v.device
        check_tensor("mask", mask, dtypes=(torch.bool,), shape=shape, last_dim_contiguous=True, device=device)
    run_merge_state(v, s, v_other, s_other, v, s, mask)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge any number of states.

    Parameters
    ----------
    v
        ``[tokens, states, heads, head_dim]``, float32, float16 or bfloat16.
    s
        float32 ``[tokens, states, heads]``, base 2.

    Returns
    -------
    tuple
        ``[tokens, heads, head_dim]`` and ``[tokens, heads]``. Without any state: 0 and -infinity.

    Raises
    ------
    ValueError
        Shapes, dtypes or devices that do not fit.
    """
    check_tensor("v", v, ndim=4, last_dim_contiguous=True)
    check_tensor("s", s, dtypes=(torch.float32,), shape=v.shape[:3], device=v.device)
    tokens, _, heads, head_dim = v.shape
    merged_v = torch.empty(tokens, heads, head_dim, dtype=v.dtype, device=v.device)
    merged_s = torch.empty(tokens, heads, dtype=torch.float32, device=v.device)
    run_merge_states(v, s, merged_v, merged_s)
    return merged_v, merged_s


def _check_state(
    v_name: str,
    v: torch.Tensor,
    s_name: str,
    s: torch.Tensor,
    *,
    like: torch.Tensor | None = None,
    writable: bool = False,
) -> None:
    if like is None:
        check_tensor(v_name, v, ndim=3, last_dim_contiguous=True, writable=writable)
    else:
        check_tensor(v_name, v, dtypes=(like.dtype,), shape=like.shape, last_dim_contiguous=True, device=like.device)
    check_tensor(s_name, s, dtypes=(torch.float32,), shape=v.shape[:2], writable=writable, device=v.device)


class MultiLevelCascadeAttentionWrapper:
    """Attention over a KV cache whose prefixes are shared by several requests, level by level.

    Level 0 holds the keys that most requests share, the last level those of each request alone. On each level the
    query rows of all requests that share a piece are attended together, so that the piece is read once; the levels'
    results are merged. All levels live in one paged cache.

    Parameters
    ----------
    num_levels
        At least 1.
    float_workspace_buffer, kv_layout, use_cuda_graph
        As in `BatchPrefillWithPagedKVCacheWrapper`.
    qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr
        The buffers of each level, used with `use_cuda_graph`.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor | None = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_indptr_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_indices_buf_arr: Sequence[torch.Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: Sequence[torch.Tensor] | None = None,
    ) -> None:
        check_int("num_levels", num_levels, 1)
        buffers: dict[str, Any] = {
            "qo_indptr_buf_arr": qo_indptr_buf_arr,
            "paged_kv_indptr_buf_arr": paged_kv_indptr_buf_arr,
            "paged_kv_indices_buf_arr": paged_kv_indices_buf_arr,
            "paged_kv_last_page_len_buf_arr": paged_kv_last_page_len_buf_arr,
        }
        if use_cuda_graph:
            for name, array in buffers.items():
                _check_levels(name, array, num_levels)
        self._use_cuda_graph = use_cuda_graph
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(
                float_workspace_buffer,
                kv_layout,
                use_cuda_graph,
                **{name.removesuffix("_arr"): array and array[level] for name, array in buffers.items()},
            )
            for level in range(num_levels)
        ]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the batch is fixed and the page tables live in buffers of the caller."""
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: Sequence[torch.Tensor]
    ) -> None:
        """Replace the workspaces from the next `plan` on; of the second kind none is needed, so it is only checked."""
        _check_levels("int_workspace_buffers", int_workspace_buffers, len(self._levels))
        for level, buffer in zip(self._levels, int_workspace_buffers, strict=True):
            level.reset_workspace_buffer(float_workspace_buffer, buffer)

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Do nothing: the same kernels serve K and V of any strides."""
        self._levels[0].prewarm_paged_kv_stride_variant(variant)

    def plan(
        self,
        qo_indptr_arr: Sequence[torch.Tensor],
        paged_kv_indptr_arr: Sequence[torch.Tensor],
        paged_kv_indices_arr: Sequence[torch.Tensor],
        paged_kv_last_page_len: Sequence[torch.Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
    ) -> None:
        """Describe a batch, level by level.

        Parameters
        ----------
        qo_indptr_arr
            For each level int32 ``[pieces + 1]``: the query rows that share each piece of keys. All levels end at the
            same number of rows.
        paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len
            For each level the page table of its pieces, as in `BatchPrefillWithPagedKVCacheWrapper.plan`.
        causal
            Applies to the last level alone: all earlier keys precede every query.
        pos_encoding_mode, window_left
            Positions and windows count from the start of a request, which a level does not know: with more than one
            level only ``"NONE"`` and -1 are accepted.
        num_qo_heads, num_kv_heads, head_dim, page_size, use_fp16_qk_reduction, sm_scale, logits_soft_cap, rope_scale, \
rope_theta, q_data_type, kv_data_type
            As in `BatchPrefillWithPagedKVCacheWrapper.plan`.

        Raises
        ------
        ValueError, TypeError, NotImplementedError
            Named after the argument that is wrong.
        """
        arrays: dict[str, Any] = {
            "qo_indptr_arr": qo_indptr_arr,
            "paged_kv_indptr_arr": paged_kv_indptr_arr,
            "paged_kv_indices_arr": paged_kv_indices_arr,
            "paged_kv_last_page_len": paged_kv_last_page_len,
        }
        for name, array in arrays.items():
            _check_levels(name, array, len(self._levels))
        if len(self._levels) > 1 and (pos_encoding_mode != "NONE" or window_left != -1):
            raise NotImplementedError(
                "pos_encoding_mode, window_left: positions are relative to a request, which a level of a cascade does "
                f"not know; expected 'NONE' and -1, got {pos_encoding_mode!r} and {window_left}"
            )
        # Those on a GPU cannot be read without waiting for it.
        rows = [int(indptr[-1]) for indptr in qo_indptr_arr if indptr.is_cpu and indptr.numel()]
        if len(set(rows)) > 1:
            raise ValueError(f"qo_indptr_arr: expected every level to end at the same number of rows, got {rows}")
        last = len(self._levels) - 1
        for i, (level, *tables) in enumerate(zip(self._levels, *arrays.values(), strict=True)):
            level.plan(
                *tables,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                causal=causal and i == last,
                pos_encoding_mode=pos_encoding_mode,
                use_fp16_qk_reduction=use_fp16_qk_reduction,
                sm_scale=sm_scale,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
            )

    begin_forward = plan

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Attend on every level and merge.

        Parameters
        ----------
        q
            ``[rows, num_qo_heads, head_dim]``.
        paged_kv_cache
            As in `BatchPrefillWithPagedKVCacheWrapper.run`.

        Returns
        -------
        torch.Tensor
            ``[rows, num_qo_heads, head_dim]`` of q's dtype.
        """
        v, s = self._levels[-1].run(q, paged_kv_cache, return_lse=True)
        for level in self._levels[:-1]:
            merge_state_in_place(v, s, *level.run(q, paged_kv_cache, return_lse=True))
        return v

    forward = run

    def end_forward(self) -> None:
        """Do nothing: the counterpart of `begin_forward` in older programs."""


def _check_levels(name: str, array: Sequence[torch.Tensor] | None, num_levels: int) -> None:
    if array is None or len(array) != num_levels:
        got = "None" if array is None else f"{len(array)}"
        raise ValueError(f"{name}: expected one tensor for each of {num_levels} levels, got {got}")
    for i, tensor in enumerate(array):
        check_tensor(f"{name}[{i}]", tensor, dtypes=None)
