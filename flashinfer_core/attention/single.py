"""Attention of one request whose keys and values are contiguous."""

from __future__ import annotations

import torch

from flashinfer_core._checks import KV_LAYOUTS, check_choice, check_tensor, refuse
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


def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: Scale = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend with one query token to the keys of one request.

    Parameters
    ----------
    q
        ``[num_qo_heads, head_dim_qk]``, float32, float16 or bfloat16.
    k, v
        ``[kv_len, num_kv_heads, head_dim]``, or ``[num_kv_heads, kv_len, head_dim]`` with ``kv_layout="HND"``.
    use_tensor_cores
        A hint to CUDA kernels; no effect on the CPU.
    pos_encoding_mode, q_scale, k_scale, v_scale, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
        See `single_prefill_with_kv_cache`.
    return_lse
        Also return the log-sum-exp.

    Returns
    -------
    torch.Tensor
        ``[num_qo_heads, head_dim_vo]`` of q's dtype, and with ``return_lse`` the base-2 log-sum-exp, float32
        ``[num_qo_heads]``.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As `single_prefill_with_kv_cache`.
    """
    check_tensor("q", q, ndim=2)
    options = AttentionOptions.check(
        False, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
    )
    out, lse = _single(q.unsqueeze(0), k, v, kv_layout, options, q_scale, k_scale, v_scale, q.dtype, None, None)
    return (out.squeeze(0), lse.squeeze(0)) if return_lse else out.squeeze(0)


def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
    o_dtype: DType | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: torch.Tensor | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend with the query tokens of one request to its keys (prefill or append).

    Parameters
    ----------
    q
        ``[qo_len, num_qo_heads, head_dim_qk]``, float32, float16 or bfloat16, any strides but the last, which is 1.
    k, v
        ``[kv_len, num_kv_heads, head_dim]``, or ``[num_kv_heads, kv_len, head_dim]`` with ``kv_layout="HND"``;
        num_kv_heads divides num_qo_heads, V may have a head_dim of its own, both at most 256.
    scale_q, scale_k, scale_v
        Scales of FP8 inputs, which this version does not take: only ``None``.
    o_dtype
        Dtype of the output; q's by default.
    custom_mask
        bool ``[qo_len, kv_len]``, or flattened: which keys a query sees. Replaces `causal`; the window still applies.
    packed_custom_mask
        uint8, the same mask as little-endian bits, see `flashinfer_core.packbits`; wins over `custom_mask`.
    causal
        Query ``i`` sees keys ``j <= i + kv_len - qo_len``.
    kv_layout
        ``"NHD"`` or ``"HND"``.
    pos_encoding_mode
        ``"NONE"``; ``"ROPE_LLAMA"`` rotates q and k on load (half-split, q at positions from ``kv_len - qo_len`` on);
        ``"ALIBI"`` adds ``slope * (j - i - kv_len + qo_len)`` to the logits (Press et al. 2022).
    use_fp16_qk_reduction
        Permits a less accurate sum on CUDA; sums are float32 on the CPU.
    sm_scale
        Factor of the logits; ``1 / sqrt(head_dim_qk)`` by default.
    window_left
        Query ``i`` sees keys ``j >= i + kv_len - qo_len - window_left``; -1 for all.
    logits_soft_cap
        ``cap > 0`` turns logits into ``cap * tanh(logits / cap)``, before ALiBi; 0 or None for none.
    rope_scale, rope_theta
        Of ``"ROPE_LLAMA"``; 1 and 10,000 by default.
    backend
        ``"auto"``. ``"fa2"`` and ``"fa3"`` name CUDA kernels, which this version does not have.
    return_lse
        Also return the log-sum-exp.
    kv_cache_sf
        Scales of FP4 keys and values, which this version does not take: only ``None``.
    k_scale, v_scale
        Factors of the logits and of the output, a number or a tensor of one element.

    Returns
    -------
    torch.Tensor
        ``[qo_len, num_qo_heads, head_dim_vo]``, and with ``return_lse`` the base-2 log-sum-exp, float32
        ``[qo_len, num_qo_heads]``. A query that sees no key gets 0 and -infinity.

    Raises
    ------
    ValueError
        A wrong shape, dtype, stride or value; the message names the argument.
    TypeError
        Not a tensor.
    NotImplementedError
        A device, dtype or keyword that this version does not have.
    """
    for name, value in (("scale_q", scale_q), ("scale_k", scale_k), ("scale_v", scale_v), ("kv_cache_sf", kv_cache_sf)):
        refuse(name, value, None, "it belongs to FP8 and FP4 inputs, which this version does not take")
    check_backend(backend)
    check_tensor("q", q, ndim=3)
    masked = custom_mask is not None or packed_custom_mask is not None
    options = AttentionOptions.check(
        causal and not masked, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
    )
    out_dtype = q.dtype if o_dtype is None else dtype_of("o_dtype", o_dtype)
    out, lse = _single(q, k, v, kv_layout, options, None, k_scale, v_scale, out_dtype, custom_mask, packed_custom_mask)
    return (out, lse) if return_lse else out


def _single(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str,
    options: AttentionOptions,
    q_scale: Scale,
    k_scale: Scale,
    v_scale: Scale,
    out_dtype: torch.dtype,
    custom_mask: torch.Tensor | None,
    packed_custom_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_choice("kv_layout", kv_layout, KV_LAYOUTS)
    check_tensor("k", k, ndim=3)
    check_tensor("v", v, ndim=3)
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    qo_len, num_qo_heads, head_dim_qk = q.shape
    kv_len, num_kv_heads, _ = k.shape
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"v: expected {kv_len} keys and {num_kv_heads} heads as k has, got shape {list(v.shape)} (NHD)"
        )
    qo_indptr = torch.tensor([0, qo_len], dtype=torch.int32)
    plan = AttentionPlan(
        qo_indptr,
        torch.tensor([kv_len], dtype=torch.int32),
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim_qk,
        head_dim_vo=v.shape[2],
        kv_start=torch.zeros(1, dtype=torch.int64),
        causal=options.causal,
        window_left=options.window_left,
    )
    out = torch.empty(qo_len, num_qo_heads, v.shape[2], dtype=out_dtype, device=q.device)
    lse = torch.empty(qo_len, num_qo_heads, dtype=torch.float32, device=q.device)
    mask, mask_indptr = packed_mask(custom_mask, packed_custom_mask, qo_indptr, [kv_len])
    plan.run(
        q,
        k,
        v,
        out,
        lse,
        sm_scale=options.scale(head_dim_qk, q_scale, k_scale),
        logits_soft_cap=options.logits_soft_cap,
        v_scale=1.0 if v_scale is None else scalar("v_scale", v_scale),
        alibi_slopes=options.alibi(num_qo_heads),
        custom_mask=mask,
        mask_indptr=mask_indptr,
        rope_cos_sin=options.rope_table(head_dim_qk, max(kv_len, qo_len)),
        kv_name="k and v",
    )
    return out, lse
