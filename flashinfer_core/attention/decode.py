"""Batched decode over a paged KV cache: one query token a request, or a fixed few for speculative decoding."""

from __future__ import annotations

import functools
from typing import Any

import torch

from flashinfer_core._checks import check_int
from flashinfer_core.attention.arrays import ArgumentNames, Buffer
from flashinfer_core.attention.deferred import takes_planned_cache, takes_short_plan
from flashinfer_core.attention.lengths import Lengths
from flashinfer_core.attention.options import AttentionOptions, DType, Scale
from flashinfer_core.attention.wrapper import PagedAttentionWrapper, Result, refuse_kernel_options, refuse_positional

_NAMES = ArgumentNames(
    qo_indptr="q_len_per_req",
    kv_indptr="indptr",
    kv_indices="indices",
    kv_last_page_len="last_page_len",
    kv_lens="seq_lens",
    block_table="block_tables",
)


class BatchDecodeWithPagedKVCacheWrapper(PagedAttentionWrapper):
    """Attention of a batch of decode requests over a paged KV cache.

    Parameters
    ----------
    float_workspace_buffer
        uint8 tensor on the device of the cache, or None; see `workspace_size` for the size that is of use.
    kv_layout
        ``"NHD"`` (pages are ``[page_size, num_kv_heads, head_dim]``) or ``"HND"``.
    use_cuda_graph
        Fix the batch size to that of the three buffers, into which `plan` copies the page table; a captured `run`
        replays with what the last `plan` wrote. The first `plan` must precede the capture. A dense page table is not
        copied: it must be the same tensor in each `plan`.
    use_tensor_cores
        No effect: the CUDA kernel always uses them.
    paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        int32 ``[batch + 1]``, ``[at least the pages of any plan]``, ``[batch]``; used with `use_cuda_graph`.
    backend
        ``"auto"``, or ``"fa2"``, the CUDA kernel of all GPUs, or ``"fa3"``, that of SM90.
    jit_args, jit_kwargs
        Only ``None``: custom CUDA variants are not in this version.

    Examples
    --------
    >>> wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, dtype=torch.uint8))
    >>> wrapper.plan(indptr, indices, last_page_len, 32, 8, 128, 16, q_data_type=torch.bfloat16)
    >>> out = wrapper.run(q, (k_pages, v_pages))
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor | None = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: object = None,
        jit_kwargs: object = None,
    ) -> None:
        buffers = {
            "kv_indptr": Buffer("paged_kv_indptr_buffer", paged_kv_indptr_buffer),
            "kv_indices": Buffer("paged_kv_indices_buffer", paged_kv_indices_buffer, exact=False),
            "kv_last_page_len": Buffer("paged_kv_last_page_len_buffer", paged_kv_last_page_len_buffer),
        }
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args, jit_kwargs, buffers)
        self._use_tensor_cores = use_tensor_cores
        self._q_len = 1

    @property
    def use_tensor_cores(self) -> bool:
        """What was asked for at construction."""
        return self._use_tensor_cores

    @takes_short_plan(kv_indptr="indptr", kv_indices="indices", kv_last_page_len="last_page_len")
    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> None:
        """Describe a batch; `run` then serves any number of layers.

        Parameters
        ----------
        indptr, indices, last_page_len
            int32 ``[batch + 1]``, ``[pages]``, ``[batch]``: request ``r`` has pages
            ``indices[indptr[r]:indptr[r + 1]]``, the last of which holds ``last_page_len[r]`` tokens. On the CPU or on
            the GPU of the cache, each as it is; `plan` waits for no GPU.
        num_qo_heads, num_kv_heads, head_dim, page_size
            The second divides the first; head_dim is at most 256.
        pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
            See `single_prefill_with_kv_cache`.
        q_data_type, kv_data_type, o_data_type, data_type
            Dtypes of q, cache and output, as torch dtypes or names. The cache's and the output's follow q's by default;
            `data_type` sets both q's and the cache's. On a GPU q is float16 or bfloat16, and the cache of q's dtype,
            float8_e4m3fn or float8_e5m2.
        non_blocking
            No effect: no copy to a GPU waits.
        block_tables, seq_lens
            int32 ``[batch, most pages]`` and ``[batch]``: the same page table in dense form, used in place of `indptr`,
            `indices` and `last_page_len` when both are given. `seq_lens` alone must agree with the page table.
        fixed_split_size
            Pages after which a request's work is cut, whatever the batch; None or -1 for a choice from the batch.
        disable_split_kv
            Never cut a request's keys. With either of the last two a request's result does not depend on its batch.
        q_len_per_req
            Query tokens of each request; above 1 they are its last tokens, with causal masking among them.

        Raises
        ------
        ValueError, TypeError, NotImplementedError
            Named after the argument that is wrong.
        RuntimeError
            Wrong values in arrays on the GPU, found by an earlier call.
        """
        check_int("q_len_per_req", q_len_per_req, 1)
        options = AttentionOptions.check(
            q_len_per_req > 1, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
        )
        if data_type is not None:
            q_data_type = kv_data_type = data_type
        if block_tables is not None and seq_lens is not None:
            keys = {"block_table": block_tables, "kv_lens": seq_lens}
        else:
            keys = {"kv_indptr": indptr, "kv_indices": indices, "kv_last_page_len": last_page_len}
        self._set(
            q_len_per_req,
            keys,
            options=options,
            dtypes=(q_data_type, kv_data_type, o_data_type),
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=head_dim,
            head_dim_vo=head_dim,
            page_size=page_size,
            fixed_split_size=fixed_split_size,
            disable_split_kv=disable_split_kv,
            names=_NAMES,
            lengths=Lengths(seq_lens),
        )
        self._q_len = q_len_per_req

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
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: object = None,
    ) -> Result:
        """Attend with the planned requests' query tokens.

        Parameters
        ----------
        q
            ``[batch * q_len_per_req, num_qo_heads, head_dim]``.
        paged_kv_cache
            ``(k, v)``, each ``[pages, page_size, num_kv_heads, head_dim]`` (``NHD``) or
            ``[pages, num_kv_heads, page_size, head_dim]`` (``HND``); or one tensor with K and V at dimension 1. Any
            strides but the last, which is 1.
        q_scale, k_scale, v_scale
            Factors of the logits (the first two) and of the output: numbers or tensors of one element, which stay on
            the GPU if they are there.
        out, lse
            Where to write; allocated if None.
        return_lse
            Also return the base-2 log-sum-exp, float32 ``[batch * q_len_per_req, num_qo_heads]``.
        enable_pdl
            A hint that no kernel needs.
        window_left
            Overrides a plan made without a window.
        sinks
            float32 ``[num_qo_heads]``: one more logit in each row's denominator (gpt-oss).
        q_len_per_req
            Must be what was planned, if given.
        skip_softmax_threshold_scale_factor, kv_cache_sf
            Only ``None``: they belong to CUDA kernels and quantized caches.

        Returns
        -------
        torch.Tensor
            ``[batch * q_len_per_req, num_qo_heads, head_dim]``, and with `return_lse` the log-sum-exp.
        """
        if args:
            refuse_positional(args)
        if skip_softmax_threshold_scale_factor is not None or kv_cache_sf is not None:
            refuse_kernel_options(
                skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor, kv_cache_sf=kv_cache_sf
            )
        if q_len_per_req is not None and self._plan is not None and q_len_per_req != self._q_len:
            raise ValueError(f"q_len_per_req: plan() was called with {self._q_len}, got {q_len_per_req}")
        return self._execute(
            q, paged_kv_cache, q_scale, k_scale, v_scale, None, out, lse, return_lse, window_left, sinks
        )

    run_return_lse = functools.partialmethod(run, return_lse=True)

    @takes_planned_cache
    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        pos_encoding_mode: str = "NONE",
        q_scale: Scale = None,
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
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            return_lse=return_lse,
            overrides={
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

        The arguments are those of `plan` and are checked alike. The first number is the size of a
        `float_workspace_buffer` that holds all partial results, the second what the wrapper allocates besides; the CPU
        kernels use no such memory: ``(0, 0)``.
        """
        scratch = BatchDecodeWithPagedKVCacheWrapper(self._no_workspace(*args, *kwargs.values()), self._kv_layout)
        scratch.plan(*args, **kwargs)
        return scratch._workspace_bytes()


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """`BatchDecodeWithPagedKVCacheWrapper` with a fixed batch size, whose page table lives in the caller's buffers.

    Parameters
    ----------
    workspace_buffer
        As `float_workspace_buffer`.
    indptr_buffer, indices_buffer, last_page_len_buffer
        int32 ``[batch + 1]``, ``[at least the pages of any plan]``, ``[batch]``.
    kv_layout, use_tensor_cores
        As in `BatchDecodeWithPagedKVCacheWrapper`.
    """

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer,
            paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer,
        )
