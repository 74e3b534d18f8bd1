"""Attention of a batch whose requests share one prefix: the prefix as dense tensors, the rest of each in pages.

The prefix is attended by the rows of all requests at once, so that its keys are read once, then each request's own
pages; the two results are merged (Ye et al., cascade inference, 2024). A prefix that is not dense, or several levels of
sharing, are for `MultiLevelCascadeAttentionWrapper`.
"""

from __future__ import annotations

from typing import Any

import torch

from flashinfer_core._checks import KV_LAYOUTS, check_choice, check_tensor, refuse
from flashinfer_core.attention.options import DType, dtype_of
from flashinfer_core.attention.prefill import BatchPrefillWithPagedKVCacheWrapper
from flashinfer_core.attention.ragged import BatchPrefillWithRaggedKVCacheWrapper
from flashinfer_core.cascade import merge_state_in_place


class _SharedPrefixWrapper:
    """What decode and prefill with a shared prefix have in common.

    Parameters
    ----------
    float_workspace_buffer
        uint8 tensor of any size on the device of the cache, or None.
    kv_layout
        Of prefix and pages: ``"NHD"`` or ``"HND"``.
    """

    def __init__(self, float_workspace_buffer: torch.Tensor | None = None, kv_layout: str = "NHD") -> None:
        check_choice("kv_layout", kv_layout, KV_LAYOUTS)
        self._token_dim = 0 if kv_layout == "NHD" else 1
        self._shared = BatchPrefillWithRaggedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._unique = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._batch: dict[str, Any] | None = None
        self._planned: tuple[object, ...] | None = None

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Replace the workspace of both parts."""
        self._shared.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)
        self._unique.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Do nothing: one kernel serves K and V of any strides."""
        self._unique.prewarm_paged_kv_stride_variant(variant)

    def end_forward(self) -> None:
        """Do nothing: the counterpart of `begin_forward`."""

    def _begin(self, **batch: Any) -> None:
        self._batch = batch
        self._planned = None

    def _attend(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        causal: bool,
        sm_scale: float | None,
    ) -> torch.Tensor:
        if self._batch is None:
            raise RuntimeError(f"{type(self).__name__}.forward: call begin_forward() first")
        check_tensor("q", q, ndim=3)
        check_tensor("k_shared", k_shared, ndim=3)
        # One plan serves all layers, whose tensors differ in nothing of this.
        key = (len(q), q.dtype, k_shared.shape[self._token_dim], k_shared.dtype, causal, sm_scale)
        if self._planned != key:
            self._plan(*key)
        # The merged result lies in the memory of the first.
        out, lse = self._unique.run(q, unique_kv_cache, return_lse=True)
        merge_state_in_place(out, lse, *self._shared.run(q, k_shared, v_shared, return_lse=True))
        return out

    def _plan(
        self,
        rows: int,
        q_dtype: torch.dtype,
        shared_len: int,
        kv_dtype: torch.dtype,
        causal: bool,
        sm_scale: float | None,
    ) -> None:
        assert self._batch is not None
        self._planned = None
        batch = {"q_data_type": q_dtype, "kv_data_type": kv_dtype, "sm_scale": sm_scale, **self._batch}
        self._unique.plan(**batch, causal=causal)
        of_both = ("num_qo_heads", "num_kv_heads", "head_dim_qk", "q_data_type", "kv_data_type", "sm_scale")
        self._shared.plan(
            torch.tensor([0, rows], dtype=torch.int32),
            torch.tensor([0, shared_len], dtype=torch.int32),
            **{name: batch[name] for name in of_both},
        )
        self._planned = (rows, q_dtype, shared_len, kv_dtype, causal, sm_scale)


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper):
    """Attention of a batch of decode requests, one query token each, that share one prefix.

    Parameters
    ----------
    float_workspace_buffer
        uint8 tensor of any size on the device of the cache, or None.
    kv_layout
        Of prefix and pages: ``"NHD"`` or ``"HND"``.
    """

    def begin_forward(
        self,
        unique_kv_indptr: torch.Tensor,
        unique_kv_indices: torch.Tensor,
        unique_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: DType = "float16",
    ) -> None:
        """Describe a batch; `forward` then serves any number of layers.

        Parameters
        ----------
        unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len
            int32: the page table of the requests' own keys, as in `BatchDecodeWithPagedKVCacheWrapper.plan`.
        num_qo_heads, num_kv_heads, head_dim, page_size
            As there.
        data_type
            Of q, prefix and cache; the tensors of `forward` must have it.
        """
        check_tensor("unique_kv_indptr", unique_kv_indptr, dtypes=(torch.int32,), ndim=1)
        dtype = dtype_of("data_type", data_type)
        self._begin(
            qo_indptr=torch.arange(len(unique_kv_indptr), dtype=torch.int32, device=unique_kv_indptr.device),
            paged_kv_indptr=unique_kv_indptr,
            paged_kv_indices=unique_kv_indices,
            paged_kv_last_page_len=unique_kv_last_page_len,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=head_dim,
            page_size=page_size,
            q_data_type=dtype,
            kv_data_type=dtype,
        )

    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Attend with each request's query token to the prefix and to its own keys.

        Parameters
        ----------
        q
            ``[batch, num_qo_heads, head_dim]``.
        k_shared, v_shared
            ``[shared_len, num_kv_heads, head_dim]`` (``NHD``) or ``[num_kv_heads, shared_len, head_dim]``.
        unique_kv_cache
            As in `BatchDecodeWithPagedKVCacheWrapper.run`.

        Returns
        -------
        torch.Tensor
            ``[batch, num_qo_heads, head_dim]`` of q's dtype.
        """
        return self._attend(q, k_shared, v_shared, unique_kv_cache, causal=False, sm_scale=None)


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper):
    """Attention of a batch of prefill or append requests that share one prefix.

    Parameters
    ----------
    float_workspace_buffer
        uint8 tensor of any size on the device of the cache, or None.
    kv_layout
        Of prefix and pages: ``"NHD"`` or ``"HND"``.
    """

    def begin_forward(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        """Describe a batch; `forward` then serves any number of layers.

        Parameters
        ----------
        qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
            int32: the query rows and the page table of the requests' own keys, as in
            `BatchPrefillWithPagedKVCacheWrapper.plan`. A request's query tokens are the last of its own keys.
        num_qo_heads, num_kv_heads, head_dim, page_size
            As there. Dtypes are those of the tensors of `forward`.
        """
        self._begin(
            qo_indptr=qo_indptr,
            paged_kv_indptr=paged_kv_indptr,
            paged_kv_indices=paged_kv_indices,
            paged_kv_last_page_len=paged_kv_last_page_len,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=head_dim,
            page_size=page_size,
        )

    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Attend with the query tokens of each request to the prefix and to its own keys.

        Parameters
        ----------
        q
            ``[qo_indptr[-1], num_qo_heads, head_dim]``.
        k_shared, v_shared
            ``[shared_len, num_kv_heads, head_dim]`` (``NHD``) or ``[num_kv_heads, shared_len, head_dim]``.
        unique_kv_cache
            As in `BatchPrefillWithPagedKVCacheWrapper.run`.
        causal
            Among a request's own keys; the prefix precedes them all, so every query sees it whole.
        use_fp16_qk_reduction, sm_scale
            See `single_prefill_with_kv_cache`.
        rope_scale, rope_theta
            Only ``None``: nothing is rotated here.

        Returns
        -------
        torch.Tensor
            ``[qo_indptr[-1], num_qo_heads, head_dim]`` of q's dtype.
        """
        for name, value in (("rope_scale", rope_scale), ("rope_theta", rope_theta)):
            refuse(name, value, None, "q and k are not rotated here")
        return self._attend(q, k_shared, v_shared, unique_kv_cache, causal, sm_scale)
