"""vLLM's own CPU attention operator, as a peer for `flashinfer_core.bench.cpu`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform


def attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_lens: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
) -> Callable[[], None]:
    """Return a call of the operator: causal, scale ``1 / sqrt(head_dim)``, split-KV as vLLM sets it by default.

    Parameters
    ----------
    q, out
        ``[tokens, num_qo_heads, head_dim]``.
    kv_cache
        ``[pages, num_kv_heads, page_size, 2 * head_dim]``, K and V side by side, page_size a multiple of 32. Copied
        into the operator's own order of a page.
    qo_indptr, kv_lens, block_table
        int32, as in `flashinfer_core.attention.AttentionPlan`.
    """
    current_platform.import_kernels()
    pages, num_kv_heads, page_size, width = kv_cache.shape
    head_dim = width // 2
    # The operator has its own builds for matrix units and for vectors; vLLM chooses in this way.
    isa = "amx" if torch.cpu._is_amx_tile_supported() and q.dtype == torch.bfloat16 else "vec"
    k, v = (part.transpose(1, 2).reshape(-1, num_kv_heads, head_dim) for part in kv_cache.chunk(2, dim=-1))
    own = torch.empty_like(kv_cache).view(pages, num_kv_heads, 2 * page_size, head_dim)
    k_cache, v_cache = own.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        k.contiguous(), v.contiguous(), k_cache, v_cache, torch.arange(pages * page_size), isa
    )
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(kv_lens),
        num_heads=q.shape[1],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        seq_lens=kv_lens,
        dtype=q.dtype,
        query_start_loc=qo_indptr,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=True,
    )

    def run() -> None:
        ops.cpu_attention_with_kv_cache(
            query=q,
            key_cache=k_cache,
            value_cache=v_cache,
            output=out,
            query_start_loc=qo_indptr,
            seq_lens=kv_lens,
            scale=head_dim**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=block_table,
            softcap=0.0,
            scheduler_metadata=schedule,
            s_aux=None,
        )

    return run
