"""Batched decode under the name and with the arguments of FlashInfer's cuDNN path; our own kernels do the work."""

from __future__ import annotations

from typing import Any

import torch

from flashinfer_core._checks import check_int, check_tensor
from flashinfer_core.attention.decode import BatchDecodeWithPagedKVCacheWrapper
from flashinfer_core.attention.lengths import check_bound
from flashinfer_core.attention.wrapper import Result, refuse_kernel_options


def cudnn_batch_decode_with_kv_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    workspace_buffer: torch.Tensor,
    *,
    max_sequence_kv: int,
    actual_seq_lens_kv: torch.Tensor | None = None,
    block_tables: torch.Tensor | None = None,
    is_cuda_graph_compatible: bool = False,
    batch_offsets_q: torch.Tensor | None = None,
    batch_offsets_o: torch.Tensor | None = None,
    batch_offsets_k: torch.Tensor | None = None,
    batch_offsets_v: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    lse: torch.Tensor | None = None,
    q_len_per_req: int = 1,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
) -> Result:
    """Attend with the query tokens of a batch to a paged KV cache, in one call.

    Parameters
    ----------
    q
        ``[batch * q_len_per_req, num_qo_heads, head_dim]``.
    k_cache, v_cache
        ``[pages, num_kv_heads, page_size, head_dim]``.
    scale
        Factor of the logits.
    workspace_buffer
        uint8 tensor of any size on the device of the cache.
    max_sequence_kv
        At least the keys of the longest request; checked where the lengths are in CPU memory.
    actual_seq_lens_kv
        int32, one for each request, in any shape such as ``[batch, 1, 1, 1]``.
    block_tables
        int32 ``[batch, most pages of a request]``.
    is_cuda_graph_compatible
        A hint; every call may be captured.
    batch_offsets_q, batch_offsets_o, batch_offsets_k, batch_offsets_v
        Only ``None``: rows and pages are found by `q_len_per_req` and `block_tables`.
    out, lse
        Where to write; allocated if None.
    return_lse
        Also return the base-2 log-sum-exp, float32 ``[batch * q_len_per_req, num_qo_heads]``.
    q_len_per_req, window_left, sinks
        As in `BatchDecodeWithPagedKVCacheWrapper`.

    Returns
    -------
    torch.Tensor
        ``[batch * q_len_per_req, num_qo_heads, head_dim]``, and with `return_lse` the log-sum-exp.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        Named after the argument that is wrong.
    """
    refuse_kernel_options(
        batch_offsets_q=batch_offsets_q,
        batch_offsets_o=batch_offsets_o,
        batch_offsets_k=batch_offsets_k,
        batch_offsets_v=batch_offsets_v,
    )
    check_int("max_sequence_kv", max_sequence_kv, 0)
    check_tensor("block_tables", block_tables, dtypes=(torch.int32,), ndim=2)
    check_tensor("actual_seq_lens_kv", actual_seq_lens_kv, dtypes=(torch.int32,))
    assert actual_seq_lens_kv is not None
    if actual_seq_lens_kv.is_cpu:
        check_bound("max_sequence_kv", max_sequence_kv, actual_seq_lens_kv.flatten().tolist())
    wrapper: Any = BatchDecodeWithPagedKVCacheWrapper(workspace_buffer, "HND")
    wrapper.plan(
        page_indices=block_tables,
        kv_lens=actual_seq_lens_kv.flatten(),
        sm_scale=scale,
        window_left=window_left,
        q_len_per_req=q_len_per_req,
    )
    result: Result = wrapper.run(q, (k_cache, v_cache), out=out, lse=lse, return_lse=return_lse, sinks=sinks)
    return result
