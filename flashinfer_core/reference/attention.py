"""Attention of one request, and the merging of partial results, in float32."""

from __future__ import annotations

import math

import torch

from flashinfer_core.reference.rope import apply_rope, rope_frequencies


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window_left: int = -1,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    custom_mask: torch.Tensor | None = None,
    rope_scale_theta: tuple[float, float] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output ``[qo_len, num_qo_heads, head_dim_vo]`` and base-2 log-sum-exp ``[qo_len, num_qo_heads]``.

    ``q`` is ``[qo_len, num_qo_heads, head_dim_qk]``, ``k`` and ``v`` are ``[kv_len, num_kv_heads, dim]``,
    ``custom_mask`` is bool ``[qo_len, kv_len]``, true for a visible key.
    """
    q, k, v = q.float(), k.float(), v.float()
    qo_len, num_qo_heads, head_dim = q.shape
    kv_len, num_kv_heads, _ = k.shape
    query_at = torch.arange(qo_len, device=q.device)[:, None] + kv_len - qo_len
    key_at = torch.arange(kv_len, device=q.device)[None, :]
    if rope_scale_theta is not None:
        frequencies = rope_frequencies(head_dim, *rope_scale_theta)
        q, k = apply_rope(q, query_at[:, 0], frequencies), apply_rope(k, key_at[0], frequencies)

    k = k.repeat_interleave(num_qo_heads // num_kv_heads, dim=1)
    v = v.repeat_interleave(num_qo_heads // num_kv_heads, dim=1)
    logits = torch.einsum("qhd,khd->hqk", q, k) * (head_dim**-0.5 if sm_scale is None else sm_scale)
    if logits_soft_cap > 0:
        logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
    if alibi_slopes is not None:
        logits = logits + alibi_slopes.float()[:, None, None] * (key_at - query_at)

    visible = torch.ones(qo_len, kv_len, dtype=torch.bool, device=q.device)
    if causal:
        visible &= key_at <= query_at
    if window_left >= 0:
        visible &= key_at >= query_at - window_left
    if custom_mask is not None:
        visible &= custom_mask
    logits = logits.masked_fill(~visible, -math.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.float()[:, None, None].expand(-1, qo_len, 1)], dim=-1)

    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.where(lse[..., None] == -math.inf, 0.0, torch.exp(logits - lse[..., None]))[..., :kv_len]
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T * math.log2(math.e)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge states ``v [tokens, states, heads, dim]``, ``s [tokens, states, heads]`` (base 2) over dimension 1."""
    top = s.amax(dim=1, keepdim=True).nan_to_num(neginf=0.0, posinf=math.inf)
    weights = torch.exp2(s - top)
    total = weights.sum(dim=1)
    seen = s > -math.inf
    terms = torch.where(seen[..., None], weights[..., None] * v.float(), 0.0)
    out = torch.where(total[..., None] > 0, terms.sum(dim=1) / total[..., None], 0.0)
    return out, top.squeeze(1) + torch.log2(total)


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """Return ALiBi's slopes (Press et al. 2022): geometric, for 2^n heads; others interleave a finer series."""
    power = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(num_heads - power)]
    return torch.tensor(slopes, dtype=torch.float32)
