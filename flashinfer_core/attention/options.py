"""The keywords that every attention function shares: what they mean, which are refused, and their native form.

Conventions, FlashInfer's: causal is aligned bottom-right, `window_left` counts keys before the query's own
position, `q_scale * k_scale` multiply the logits and `v_scale` the output, LSE is base 2, no visible key gives output 0
and LSE -infinity.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields
from typing import Any

import torch

from flashinfer_core._checks import DTYPE_CODES, check_choice, check_int, check_tensor, refuse
from flashinfer_core.quantization import segment_packbits

POS_ENCODING_MODES = ("NONE", "ROPE_LLAMA", "ALIBI")
_UNCHANGED = (None, False, -1, "NONE")  # the defaults of the older call forms, which keep what was planned
Scale = float | torch.Tensor | None
DType = str | torch.dtype


@dataclass(frozen=True)
class AttentionOptions:
    """What happens to a score between the product q k and the softmax, the same for all rows of a call."""

    causal: bool = False
    window_left: int = -1
    sm_scale: float | None = None
    logits_soft_cap: float = 0.0
    pos_encoding_mode: str = "NONE"
    rope_scale: float = 1.0
    rope_theta: float = 1e4

    @staticmethod
    def check(
        causal: bool,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        rope_scale: float | None,
        rope_theta: float | None,
    ) -> AttentionOptions:
        """Check the public keywords and fill in their defaults."""
        check_choice("pos_encoding_mode", pos_encoding_mode, POS_ENCODING_MODES)
        check_int("window_left", window_left, -1)
        soft_cap = 0.0 if logits_soft_cap is None else _finite("logits_soft_cap", logits_soft_cap)
        if soft_cap < 0:
            raise ValueError(f"logits_soft_cap: expected a number of at least 0 (0 for none), got {logits_soft_cap}")
        return AttentionOptions(
            causal=bool(causal),
            window_left=window_left,
            sm_scale=None if sm_scale is None else _finite("sm_scale", sm_scale),
            logits_soft_cap=soft_cap,
            pos_encoding_mode=pos_encoding_mode,
            rope_scale=1.0 if rope_scale is None else _positive("rope_scale", rope_scale),
            rope_theta=1e4 if rope_theta is None else _positive("rope_theta", rope_theta),
        )

    def override(self, **given: Any) -> AttentionOptions:
        """Return these options with those keywords of `check` replaced that differ from their defaults."""
        changed = {name: value for name, value in given.items() if value not in _UNCHANGED}
        now = {field.name: getattr(self, field.name) for field in fields(self)}
        return AttentionOptions.check(**(now | changed))

    def scale(self, head_dim: int, q_scale: Scale, k_scale: Scale) -> float:
        """Return the factor of the logits."""
        scale = head_dim**-0.5 if self.sm_scale is None else self.sm_scale
        if q_scale is not None:
            scale *= scalar("q_scale", q_scale)
        if k_scale is not None:
            scale *= scalar("k_scale", k_scale)
        return scale

    def alibi(self, num_qo_heads: int) -> torch.Tensor | None:
        """Return the slopes if the mode is ALIBI."""
        return get_alibi_slopes(num_qo_heads) if self.pos_encoding_mode == "ALIBI" else None

    def rope_table(self, head_dim: int, positions: int) -> torch.Tensor | None:
        """Return cosines and sines of at least `positions` positions if the mode is ROPE_LLAMA."""
        if self.pos_encoding_mode != "ROPE_LLAMA":
            return None
        if head_dim % 2:
            raise ValueError(f"pos_encoding_mode: ROPE_LLAMA expects an even head_dim, got {head_dim}")
        # Rounded up so that a decode loop does not make a table for each length.
        return _rope_table(head_dim, -(-positions // 1024) * 1024, self.rope_scale, self.rope_theta)


def scalar(name: str, value: float | torch.Tensor) -> float:
    """Return a scale given as a number or as a tensor of one element."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise NotImplementedError(
                f"{name}: expected a number or a tensor of one element, got a tensor of shape {list(value.shape)}; "
                "scales per head or per token are not supported in this version"
            )
        value = value.item()
    return _finite(name, value)


def dtype_of(name: str, dtype: DType) -> torch.dtype:
    """Return a dtype given as such or by name ("float16"); only those with kernels pass."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name}: expected a torch.dtype or its name, got {dtype!r}")
    if found not in DTYPE_CODES:
        raise NotImplementedError(f"{name}: expected float32, float16 or bfloat16, got {found}")
    return found


def check_backend(backend: str) -> None:
    """Refuse a backend other than "auto": CPU tensors have one implementation."""
    check_choice("backend", backend, ("auto", "fa2", "fa3"))
    refuse("backend", backend, "auto", "it names a CUDA kernel, and this version works on CPU tensors")


def get_alibi_slopes(n_heads: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Return ALiBi's slope of each head (Press et al., "Train Short, Test Long", 2022).

    Parameters
    ----------
    n_heads
        Number of query heads. The series is geometric for a power of two; other numbers take every second term of the
        next finer series for the heads left over.
    device
        Of the result; the default is the CPU.

    Returns
    -------
    torch.Tensor
        float32 ``[n_heads]``.
    """
    check_int("n_heads", n_heads, 1)
    slopes = _alibi_slopes(n_heads)
    return slopes if device is None else slopes.to(device)


@functools.lru_cache(maxsize=64)
def _alibi_slopes(n_heads: int) -> torch.Tensor:
    power = 1 << (n_heads.bit_length() - 1)
    exponents = [8 * (i + 1) / power for i in range(power)]
    exponents += [4 * (2 * i + 1) / power for i in range(n_heads - power)]
    return torch.tensor([2.0**-e for e in exponents], dtype=torch.float32)


@functools.lru_cache(maxsize=4)
def _rope_table(head_dim: int, positions: int, scale: float, theta: float) -> torch.Tensor:
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim) / scale
    # Angles in float64: at position 100,000 a float32 angle is off by 0.004.
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()


def packed_mask(
    custom_mask: torch.Tensor | None,
    packed_custom_mask: torch.Tensor | None,
    qo_indptr: torch.Tensor,
    kv_lens: list[int],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return a custom mask as little-endian bits with the first byte of each request, or two ``None``.

    Parameters
    ----------
    custom_mask
        bool or 0/1, the masks ``[qo_len, kv_len]`` of all requests, flattened one after the other.
    packed_custom_mask
        uint8, the same as bits, each request on a fresh byte; wins over `custom_mask`.
    qo_indptr, kv_lens
        The planned lengths.
    """
    if custom_mask is None and packed_custom_mask is None:
        return None, None
    bits = [qo * kv for qo, kv in zip(qo_indptr.diff().tolist(), kv_lens, strict=True)]
    if packed_custom_mask is not None:
        check_tensor("packed_custom_mask", packed_custom_mask, dtypes=(torch.uint8,), ndim=1, last_dim_contiguous=True)
        byte_indptr = torch.tensor([0, *((n + 7) // 8 for n in bits)], dtype=torch.int64).cumsum(0)
        if packed_custom_mask.numel() < int(byte_indptr[-1]):
            raise ValueError(
                f"packed_custom_mask: expected at least {int(byte_indptr[-1])} bytes, got {packed_custom_mask.numel()}"
            )
        return packed_custom_mask, byte_indptr
    assert custom_mask is not None
    check_tensor("custom_mask", custom_mask, dtypes=(torch.bool, torch.uint8, torch.int32, torch.int64))
    if custom_mask.numel() != sum(bits):
        raise ValueError(f"custom_mask: expected {sum(bits)} elements, got {custom_mask.numel()}")
    bit_indptr = torch.tensor([0, *bits], dtype=torch.int64).cumsum(0)
    return segment_packbits(custom_mask.reshape(-1), bit_indptr, bitorder="little")


def _finite(name: str, value: float) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number, got {value!r}")
    return float(value)


def _positive(name: str, value: float) -> float:
    if _finite(name, value) <= 0:
        raise ValueError(f"{name}: expected a number above 0, got {value!r}")
    return float(value)
