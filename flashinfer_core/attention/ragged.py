"""Batched prefill over ragged keys and values: one request after the other, without padding."""

from __future__ import annotations

import functools

import torch

from flashinfer_core._checks import check_tensor
from flashinfer_core.attention.arrays import ArgumentNames, Buffer
from flashinfer_core.attention.deferred import takes_kv_data, takes_short_plan
from flashinfer_core.attention.layout import Cache
from flashinfer_core.attention.lengths import Lengths
from flashinfer_core.attention.options import AttentionOptions, DType, Scale
from flashinfer_core.attention.wrapper import AttentionWrapper, Result, refuse_kernel_options, refuse_positional

_NAMES = ArgumentNames(kv_lens="kv_indptr")


class BatchPrefillWithRaggedKVCacheWrapper(AttentionWrapper):
    """Attention of a batch of requests whose keys and values lie one request after the other, without padding.

    Parameters
    ----------
    float_workspace_buffer
        uint8 tensor on the device of the tensors, or None.
    kv_layout
        ``"NHD"`` for K and V ``[tokens, num_kv_heads, head_dim]``, ``"HND"`` for ``[num_kv_heads, tokens, head_dim]``.
    use_cuda_graph, qo_indptr_buf, kv_indptr_buf
        Fix the batch size to that of the buffers, int32 ``[batch + 1]``, into which `plan` copies.
    custom_mask_buf, mask_indptr_buf, backend, jit_args, jit_kwargs, variant_owns_mask
        As in `BatchPrefillWithPagedKVCacheWrapper`.
    """

    _kv_name = "k and v"

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor | None = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: object = None,
        jit_kwargs: object = None,
        variant_owns_mask: bool = False,
    ) -> None:
        buffers = {
            "qo_indptr": Buffer("qo_indptr_buf", qo_indptr_buf),
            "kv_indptr": Buffer("kv_indptr_buf", kv_indptr_buf),
        }
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args, jit_kwargs, buffers)
        refuse_kernel_options(variant_owns_mask=variant_owns_mask)
        self._custom_mask_buf = custom_mask_buf
        self._mask_indptr_buf = mask_indptr_buf

    @takes_short_plan(kv_indptr="kv_indptr")
    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
        qo_indptr_cpu: torch.Tensor | None = None,
        kv_indptr_cpu: torch.Tensor | None = None,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Describe a batch; `run` then serves any number of layers.

        Parameters
        ----------
        qo_indptr, kv_indptr
            int32 ``[batch + 1]``: request ``r`` has query rows ``qo_indptr[r]`` to ``qo_indptr[r + 1]`` and keys
            ``kv_indptr[r]`` to ``kv_indptr[r + 1]``.
        fixed_split_size
            Keys after which a request's work is cut, whatever the batch; None or -1 for a choice from the batch.
        seq_lens, seq_lens_q
            Key and query lengths: must agree with the ``indptr`` arrays.
        v_indptr, o_indptr
            Offsets of V and of the output that differ from those of K and q: not in this version, None.
        qo_indptr_cpu, kv_indptr_cpu
            Copies of the ``indptr`` arrays on the host, used in their place.
        others
            As in `BatchPrefillWithPagedKVCacheWrapper.plan`.

        Raises
        ------
        ValueError, TypeError, NotImplementedError
            Named after the argument that is wrong.
        """
        refuse_kernel_options(
            prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr,
            token_pos_in_items_len=token_pos_in_items_len or None,
            max_item_len_ptr=max_item_len_ptr,
            v_indptr=v_indptr,
            o_indptr=o_indptr,
            use_token_head_sf=use_token_head_sf,
        )
        masked = custom_mask is not None or packed_custom_mask is not None
        options = AttentionOptions.check(
            causal and not masked, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
        )
        self._set(
            qo_indptr if qo_indptr_cpu is None else qo_indptr_cpu,
            {"kv_indptr": kv_indptr if kv_indptr_cpu is None else kv_indptr_cpu},
            options=options,
            dtypes=(q_data_type, kv_data_type, o_data_type),
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=head_dim_qk,
            head_dim_vo=head_dim_vo,
            page_size=None,
            fixed_split_size=fixed_split_size,
            disable_split_kv=disable_split_kv,
            names=_NAMES,
            lengths=Lengths(seq_lens, max_sequence_kv, seq_lens_q, max_token_per_sequence, uniform_q_len),
            custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask,
        )

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: object,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        o_scale: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: object = None,
    ) -> Result:
        """Attend with the planned requests' query tokens.

        Parameters
        ----------
        q, k, v
            ``[qo_indptr[-1], num_qo_heads, head_dim_qk]`` and ``[kv_indptr[-1], num_kv_heads, head_dim]`` (``NHD``).
        o_scale
            The output is divided by it.
        others
            As in `BatchPrefillWithPagedKVCacheWrapper.run`.

        Returns
        -------
        torch.Tensor
            ``[qo_indptr[-1], num_qo_heads, head_dim_vo]``, and with `return_lse` the log-sum-exp.
        """
        if args:
            refuse_positional(args)
        if kv_cache_sf is not None:
            refuse_kernel_options(kv_cache_sf=kv_cache_sf)
        return self._execute(
            q, (k, v), q_scale, k_scale, v_scale, o_scale, out, lse, return_lse, None, None, lse_base, lse_layout
        )

    run_return_lse = functools.partialmethod(run, return_lse=True)

    @takes_kv_data
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
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
            (k, v),
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

    def _split(self, cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = cache
        check_tensor("k", k, dtypes=None, ndim=3)
        check_tensor("v", v, dtypes=None, ndim=3)
        return (k, v) if self._kv_layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
