"""Attention of one request whose keys and values are contiguous."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from flashinfer_core._checks import FLOAT_DTYPES, FP8_DTYPES, KV_LAYOUTS, check_choice, check_tensor, refuse
from flashinfer_core._cuda import current_stream
from flashinfer_core._ops import native_op
from flashinfer_core.attention.masks import packed_mask
from flashinfer_core.attention.memory import PlanMemory, Pool, is_capturing
from flashinfer_core.attention.operators import joined, separate
from flashinfer_core.attention.options import AttentionOptions, DType, Scale, check_backend, dtype_of, join_scales
from flashinfer_core.attention.plan import AttentionPlan

_KV_DTYPES = (*FLOAT_DTYPES, *FP8_DTYPES)


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
        ``[num_qo_heads, head_dim_qk]``, float16, bfloat16 or on the CPU float32.
    k, v
        ``[kv_len, num_kv_heads, head_dim]``, or ``[num_kv_heads, kv_len, head_dim]`` with ``kv_layout="HND"``.
    use_tensor_cores
        No effect: the CUDA kernel always uses them.
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
        ``[qo_len, num_qo_heads, head_dim_qk]``, float16, bfloat16 or on the CPU float32, any strides but the last,
        which is 1.
    k, v
        ``[kv_len, num_kv_heads, head_dim]``, or ``[num_kv_heads, kv_len, head_dim]`` with ``kv_layout="HND"``;
        num_kv_heads divides num_qo_heads, V may have a head_dim of its own, both at most 256. On a GPU of q's dtype,
        float8_e4m3fn or float8_e5m2.
    scale_q, scale_k, scale_v
        Scales of FP8 queries, which this version does not take: only ``None``.
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
        Permits a less accurate sum; sums are float32 in any case.
    sm_scale
        Factor of the logits; ``1 / sqrt(head_dim_qk)`` by default.
    window_left
        Query ``i`` sees keys ``j >= i + kv_len - qo_len - window_left``; -1 for all.
    logits_soft_cap
        ``cap > 0`` turns logits into ``cap * tanh(logits / cap)``, before ALiBi; 0 or None for none.
    rope_scale, rope_theta
        Of ``"ROPE_LLAMA"``; 1 and 10,000 by default.
    backend
        ``"auto"``, or for tensors on a GPU ``"fa2"``, the kernel of all GPUs, or ``"fa3"``, that of SM90, which is
        refused where it does not apply.
    return_lse
        Also return the log-sum-exp.
    kv_cache_sf
        Scales of FP4 keys and values, which this version does not take: only ``None``.
    k_scale, v_scale
        Factors of the logits and of the output, a number or a tensor of one element, which stays on the GPU if it is
        there.

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
    check_tensor("q", q, ndim=3)
    check_backend(backend, q.device)
    masked = custom_mask is not None or packed_custom_mask is not None
    options = AttentionOptions.check(
        causal and not masked, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
    )
    out_dtype = q.dtype if o_dtype is None else dtype_of("o_dtype", o_dtype)
    out, lse = _single(
        q, k, v, kv_layout, options, None, k_scale, v_scale, out_dtype, custom_mask, packed_custom_mask, backend
    )
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
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    check_choice("kv_layout", kv_layout, KV_LAYOUTS)
    check_tensor("k", k, dtypes=_KV_DTYPES, ndim=3)
    check_tensor("v", v, dtypes=_KV_DTYPES, ndim=3)
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"v: expected {k.shape[0]} keys and {k.shape[1]} heads as k has, got shape {list(v.shape)} (NHD)"
        )
    out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=out_dtype, device=q.device)
    lse = torch.empty(q.shape[0], q.shape[1], dtype=torch.float32, device=q.device)
    _single_attention(
        q,
        k,
        v,
        out,
        lse,
        *separate((q_scale, k_scale, v_scale)),
        custom_mask,
        packed_custom_mask,
        options.causal,
        options.window_left,
        options.sm_scale,
        options.logits_soft_cap,
        options.pos_encoding_mode,
        options.rope_scale,
        options.rope_theta,
        backend,
    )
    return out, lse


@native_op(
    "Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) lse, float[] factors, Tensor?[] scales, "
    "Tensor? custom_mask, Tensor? packed_custom_mask, bool causal, int window_left, float? sm_scale, "
    "float logits_soft_cap, str pos_encoding_mode, float rope_scale, float rope_theta, str backend"
)
def _single_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    factors: list[float],
    scales: Sequence[torch.Tensor | None],
    custom_mask: torch.Tensor | None,
    packed_custom_mask: torch.Tensor | None,
    causal: bool,
    window_left: int,
    sm_scale: float | None,
    logits_soft_cap: float,
    pos_encoding_mode: str,
    rope_scale: float,
    rope_theta: float,
    backend: str,
) -> None:
    options = AttentionOptions(
        causal, window_left, sm_scale, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta
    )
    heads, dim_qk, dim_vo = q.shape[1], q.shape[2], v.shape[2]
    plan = _plan(q.device, len(q), len(k), heads, k.shape[1], dim_qk, dim_vo, causal, window_left, k.dtype, backend)
    arrays = plan.arrays
    if not (q.is_cuda and is_capturing(q.device)):
        arrays = arrays.moved({"kv_lens": torch.tensor([len(k)], dtype=torch.int32)})  # for which the mask is checked
    mask, mask_indptr = packed_mask(custom_mask, packed_custom_mask, arrays, q.device)
    q_scale, k_scale, v_scale = joined(factors, scales)
    logit_factor, v_factor, gpu_scales = join_scales((q_scale, k_scale, v_scale, None))
    plan.run(
        q,
        k,
        v,
        out,
        lse,
        sm_scale=options.scale(dim_qk) * logit_factor,
        logits_soft_cap=logits_soft_cap,
        v_scale=v_factor,
        alibi_slopes=options.alibi(heads, q.device),
        custom_mask=mask,
        mask_indptr=mask_indptr,
        rope_cos_sin=options.rope_table(dim_qk, max(len(q), len(k)), q.device),
        gpu_scales=gpu_scales,
        kv_name="k and v",
    )


def _plan(device: torch.device, *batch: Any) -> AttentionPlan:
    if device.type == "cpu":
        return _make_plan(device, None, *batch)
    if is_capturing(device):  # the graph keeps what it uses, and nothing else may
        return _make_plan(device, PlanMemory(device), *batch)
    return _plan_on_stream(device, current_stream(device.index), *batch)


@functools.lru_cache(maxsize=16)
def _plan_on_stream(device: torch.device, stream: int, *batch: Any) -> AttentionPlan:
    return _make_plan(device, PlanMemory(device, scratch=_scratch(device, stream)), *batch)


@functools.lru_cache(maxsize=16)
def _scratch(device: torch.device, stream: int) -> Pool:
    return Pool(device)


def _make_plan(
    device: torch.device,
    memory: PlanMemory | None,
    q_len: int,
    kv_len: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim_qk: int,
    head_dim_vo: int,
    causal: bool,
    window_left: int,
    kv_dtype: torch.dtype,
    backend: str,
) -> AttentionPlan:
    # A number that the host knows is filled in on the GPU: that needs no copy, so it may be captured.
    return AttentionPlan(
        q_len,
        torch.full((1,), kv_len, dtype=torch.int32, device=device),
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo,
        causal=causal,
        window_left=window_left,
        device=device,
        memory=memory,
        kv_dtype=kv_dtype,
        backend=backend,
    )
