"""Batched prefill and append over a paged KV cache."""

from __future__ import annotations

import functools
from typing import Any

import torch

from flashinfer_core.attention.arrays import ArgumentNames, Buffer
from flashinfer_core.attention.deferred import takes_planned_cache, takes_short_plan
from flashinfer_core.attention.lengths import Lengths
from flashinfer_core.attention.options import AttentionOptions, DType, Scale
from flashinfer_core.attention.wrapper import PagedAttentionWrapper, Result, refuse_kernel_options, refuse_positional

_NAMES = ArgumentNames(
    kv_indptr="paged_kv_indptr",
    kv_indices="paged_kv_indices",
    kv_last_page_len="paged_kv_last_page_len",
    kv_lens="seq_lens",
    block_table="block_tables",
)


class BatchPrefillWithPagedKVCacheWrapper(PagedAttentionWrapper):
    """Attention of a batch of prefill or append requests over a paged KV cache.

    Parameters
    ----------
    float_workspace_buffer
        uint8 tensor on the device of the cache, or None; see `workspace_size` for the size that is of use.
    kv_layout
        ``"NHD"`` (pages are ``[page_size, num_kv_heads, head_dim]``) or ``"HND"``.
    use_cuda_graph
        Fix the batch size to that of the buffers, into which `plan` copies the page table; see
        `BatchDecodeWithPagedKVCacheWrapper`.
    qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf
        int32 ``[batch + 1]``, ``[batch + 1]``, ``[at least the pages of any plan]``, ``[batch]``; used with
        `use_cuda_graph`.
    custom_mask_buf, mask_indptr_buf
        uint8 and int32 ``[batch + 1]``: where `plan` copies packed masks with `use_cuda_graph`.
    backend
        ``"auto"``, or ``"fa2"``, the CUDA kernel of all GPUs, or ``"fa3"``, that of SM90.
    jit_args, jit_kwargs, variant_owns_mask
        Custom CUDA variants, which are not in this version: None and False.
    max_total_num_rows
        Most query tokens of any plan; `plan` refuses more.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor | None = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: object = None,
        jit_kwargs: object = None,
        variant_owns_mask: bool = False,
        max_total_num_rows: int | None = None,
    ) -> None:
        buffers = {
            "qo_indptr": Buffer("qo_indptr_buf", qo_indptr_buf),
            "kv_indptr": Buffer("paged_kv_indptr_buf", paged_kv_indptr_buf),
            "kv_indices": Buffer("paged_kv_indices_buf", paged_kv_indices_buf, exact=False),
            "kv_last_page_len": Buffer("paged_kv_last_page_len_buf", paged_kv_last_page_len_buf),
        }
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args, jit_kwargs, buffers)
        refuse_kernel_options(variant_owns_mask=variant_owns_mask)
        self._custom_mask_buf = custom_mask_buf
        self._mask_indptr_buf = mask_indptr_buf
        self._max_total_num_rows = max_total_num_rows

    @takes_short_plan(
        kv_indptr="paged_kv_indptr", kv_indices="paged_kv_indices", kv_last_page_len="paged_kv_last_page_len"
    )
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
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
        o_data_type: DType | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Describe a batch; `run` then serves any number of layers.

        Parameters
        ----------
        qo_indptr
            int32 ``[batch + 1]``: request ``r`` has query rows ``qo_indptr[r]`` to ``qo_indptr[r + 1]``, the last
            tokens of its keys.
        paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
            int32 ``[batch + 1]``, ``[pages]``, ``[batch]``: request ``r`` has pages
            ``indices[indptr[r]:indptr[r + 1]]``, the last of which holds ``last_page_len[r]`` tokens.
        num_qo_heads, num_kv_heads, head_dim_qk, page_size, head_dim_vo
            num_kv_heads divides num_qo_heads; head dims are at most 256, V's follows K's by default.
        custom_mask, packed_custom_mask
            The masks ``[qo_len, kv_len]`` of all requests, flattened one after the other (bool), or packed by
            `segment_packbits` with ``bitorder="little"``. They replace `causal`; the window still applies.
        causal, pos_encoding_mode, use_fp16_qk_reduction, sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta
            See `single_prefill_with_kv_cache`.
        q_data_type, kv_data_type, o_data_type
            Dtypes of q, cache and output; the others follow q's by default. On a GPU q is float16 or bfloat16, and the
            cache of q's dtype, float8_e4m3fn or float8_e5m2.
        non_blocking
            No effect: no copy to a GPU waits.
        prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr, use_token_head_sf
            Multi-item scoring and quantized caches, which are not in this version: None, 0 and False.
        block_tables, seq_lens
            int32 ``[batch, most pages]`` and ``[batch]``: the page table in dense form, used in place of the CSR
            arrays when both are given. `seq_lens` alone must agree with the page table.
        seq_lens_q, max_token_per_sequence, max_sequence_kv, uniform_q_len
            Query lengths, bounds of query and key lengths, and the one query length of all requests: checked where the
            arrays are in CPU memory. Where `qo_indptr` is on a GPU, one that says how many query rows a request has
            helps to choose the kernel.
        fixed_split_size
            Pages after which a request's work is cut, whatever the batch; None or -1 for a choice from the batch. It
            needs the lengths in CPU memory.
        disable_split_kv
            Never cut a request's keys. With either of the last two a request's result does not depend on its batch.

        Raises
        ------
        ValueError, TypeError, NotImplementedError
            Named after the argument that is wrong.
        RuntimeError
            Wrong values in arrays on the GPU, found by an earlier call.

        Notes
        -----
        Index arrays are on the CPU or on the GPU of the cache, each as it is; `plan` waits for no GPU.
        """
        refuse_kernel_options(
            prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr,
            token_pos_in_items_len=token_pos_in_items_len or None,
            max_item_len_ptr=max_item_len_ptr,
            use_token_head_sf=use_token_head_sf,
        )
        masked = custom_mask is not None or packed_custom_mask is not None
        options = AttentionOptions.check(
            causal and not masked, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
        )
        if block_tables is not None and seq_lens is not None:
            keys = {"block_table": block_tables, "kv_lens": seq_lens}
        else:
            keys = {
                "kv_indptr": paged_kv_indptr,
                "kv_indices": paged_kv_indices,
                "kv_last_page_len": paged_kv_last_page_len,
            }
        self._set(
            qo_indptr,
            keys,
            options=options,
            dtypes=(q_data_type, kv_data_type, o_data_type),
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=head_dim_qk,
            head_dim_vo=head_dim_vo,
            page_size=page_size,
            fixed_split_size=fixed_split_size,
            disable_split_kv=disable_split_kv,
            names=_NAMES,
            lengths=Lengths(seq_lens, max_sequence_kv, seq_lens_q, max_token_per_sequence, uniform_q_len),
            custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask,
            max_rows=self._max_total_num_rows,
        )

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args: object,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: object = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Result:
        """Attend with the planned requests' query tokens.

        Parameters
        ----------
        q
            ``[qo_indptr[-1], num_qo_heads, head_dim_qk]``.
        paged_kv_cache, q_scale, k_scale, v_scale, out, enable_pdl, window_left, sinks
            See `BatchDecodeWithPagedKVCacheWrapper.run`.
        lse, return_lse
            Also return the log-sum-exp, float32, written to `lse` if given.
        lse_base
            ``"log2"`` or ``"ln"``.
        lse_layout
            ``"NH"`` for ``[tokens, heads]`` or ``"HN"``.
        kv_cache_sf, skip_softmax_threshold_scale_factor, use_fp16_softmax, uses_spcompress
            CUDA kernels and quantized caches, which are not in this version: None.

        Returns
        -------
        torch.Tensor
            ``[qo_indptr[-1], num_qo_heads, head_dim_vo]``, and with `return_lse` the log-sum-exp.
        """
        if args:
            refuse_positional(args)
        if (
            kv_cache_sf is not None
            or skip_softmax_threshold_scale_factor is not None
            or use_fp16_softmax is not None
            or uses_spcompress is not None
        ):
            refuse_kernel_options(
                kv_cache_sf=kv_cache_sf,
                skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
                use_fp16_softmax=use_fp16_softmax,
                uses_spcompress=uses_spcompress,
            )
        return self._execute(
            q, paged_kv_cache, q_scale, k_scale, v_scale, None, out, lse, return_lse, window_left, sinks, lse_base,
            lse_layout,
        )  # fmt: skip

    run_return_lse = functools.partialmethod(run, return_lse=True)

    @takes_planned_cache
    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: Scale = None,
        v_scale: Scale = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> Result:
        """Run with options given here: the older form of `run`. Those left at their defaults stay as planned."""
        return self._execute(
            q,
            paged_kv_cache,
            k_scale=k_scale,
            v_scale=v_scale,
            return_lse=return_lse,
            overrides={
                "causal": causal and self._mask is None,
                "pos_encoding_mode": pos_encoding_mode,
                "window_left": window_left,
                "logits_soft_cap": logits_soft_cap,
                "sm_scale": sm_scale,
                "rope_scale": rope_scale,
                "rope_theta": rope_theta,
            },
        )

    forward_return_lse = functools.partialmethod(forward, return_lse=True)

    def workspace_size(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Return the bytes of float and int workspace that a `plan` with these arguments needs.

        See `BatchDecodeWithPagedKVCacheWrapper.workspace_size`.
        """
        scratch = BatchPrefillWithPagedKVCacheWrapper(self._no_workspace(*args, *kwargs.values()), self._kv_layout)
        scratch.plan(*args, **kwargs)
        return scratch._workspace_bytes()
