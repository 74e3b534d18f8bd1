"""The keywords that every attention function shares: what they mean, which are refused, and their native form.

Conventions, FlashInfer's: causal is aligned bottom-right, `window_left` counts keys before the query's own
position, `q_scale * k_scale` multiply the logits and `v_scale` the output, LSE is base 2, no visible key gives output 0
and LSE -infinity.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

from flashinfer_core._checks import FLOAT_DTYPES, check_choice, check_int, refuse
from flashinfer_core.attention.memory import is_capturing

BACKENDS = ("auto", "fa2", "fa3")
POS_ENCODING_MODES = ("NONE", "ROPE_LLAMA", "ALIBI")
_UNCHANGED = (None, False, -1, "NONE")  # the defaults of the older call forms, which keep what was planned
Scale = float | torch.Tensor | None
DType = str | torch.dtype
GpuScales = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
NO_GPU_SCALES: GpuScales = (None, None, None)


class AttentionOptions(NamedTuple):
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
        return AttentionOptions.check(**(self._asdict() | changed))

    def scale(self, head_dim: int) -> float:
        """Return the factor of the logits."""
        return head_dim**-0.5 if self.sm_scale is None else self.sm_scale

    def alibi(self, num_qo_heads: int, device: torch.device) -> torch.Tensor | None:
        """Return the slopes if the mode is ALIBI."""
        return _alibi_on(num_qo_heads, device) if self.pos_encoding_mode == "ALIBI" else None

    def rope_table(self, head_dim: int, positions: int, device: torch.device) -> torch.Tensor | None:
        """Return cosines and sines of at least `positions` positions if the mode is ROPE_LLAMA."""
        if self.pos_encoding_mode != "ROPE_LLAMA":
            return None
        if head_dim % 2:
            raise ValueError(f"pos_encoding_mode: ROPE_LLAMA expects an even head_dim, got {head_dim}")
        # Rounded up so that a decode loop does not make a table for each length.
        return _rope_table(head_dim, -(-positions // 1024) * 1024, self.rope_scale, self.rope_theta, device)


def split_scale(name: str, value: Scale) -> tuple[float, torch.Tensor | None]:
    """Return a scale as a factor and, if it is a tensor on a GPU, that tensor as float32 and 1 for the factor."""
    if value is None:
        return 1.0, None
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise NotImplementedError(
                f"{name}: expected a number or a tensor of one element, got a tensor of shape {list(value.shape)}; "
                "scales per head or per token are not supported in this version"
            )
        if value.is_cuda:
            return 1.0, value.float()
        value = value.item()
    return _finite(name, value), None


def join_scales(scales: tuple[Scale, Scale, Scale, Scale]) -> tuple[float, float, GpuScales]:
    """Return the factors of logits and output for scales of q, k, v and the output, and those that are on a GPU."""
    q_scale, k_scale, v_scale, o_scale = scales
    if q_scale is None and k_scale is None and v_scale is None and o_scale is None:
        return 1.0, 1.0, NO_GPU_SCALES
    q_factor, gpu_q_scale = split_scale("q_scale", q_scale)
    k_factor, gpu_k_scale = split_scale("k_scale", k_scale)
    v_factor, gpu_v_scale = split_scale("v_scale", v_scale)
    if o_scale is not None:
        o_factor, gpu_o_scale = split_scale("o_scale", o_scale)
        v_factor /= o_factor
        if gpu_o_scale is not None:
            gpu_v_scale = (1.0 if gpu_v_scale is None else gpu_v_scale) / gpu_o_scale
    return q_factor * k_factor, v_factor, (gpu_q_scale, gpu_k_scale, gpu_v_scale)


def dtype_of(name: str, dtype: DType, known: tuple[torch.dtype, ...] = FLOAT_DTYPES) -> torch.dtype:
    """Return a dtype given as such or by name ("float16"); only those with kernels pass."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name}: expected a torch.dtype or its name, got {dtype!r}")
    if found not in known:
        listed = ", ".join(str(one).removeprefix("torch.") for one in known)
        raise NotImplementedError(f"{name}: expected one of {listed}, got {found}")
    return found


def check_backend(backend: str, device: torch.device | None) -> None:
    """Refuse a backend that does not exist, or not for the device if that is known."""
    check_choice("backend", backend, BACKENDS)
    if backend != "auto" and device is not None and device.type == "cpu":
        refuse("backend", backend, "auto", "it names a CUDA kernel, and the tensors are on the CPU")


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


@functools.lru_cache(maxsize=16)
def _alibi_on(n_heads: int, device: torch.device) -> torch.Tensor:
    slopes = _alibi_slopes(n_heads)
    if device.type == "cpu":
        return slopes
    _not_captured("ALIBI", device)
    return slopes.pin_memory().to(device, non_blocking=True)


@functools.lru_cache(maxsize=4)
def _rope_table(head_dim: int, positions: int, scale: float, theta: float, device: torch.device) -> torch.Tensor:
    _not_captured("ROPE_LLAMA", device)
    at = functools.partial(torch.arange, dtype=torch.float64, device=device)
    frequencies = theta ** -(at(0, head_dim, 2) / head_dim) / scale
    # Angles in float64: at position 100,000 a float32 angle is off by 0.004.
    angles = at(positions)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()


def _not_captured(mode: str, device: torch.device) -> None:
    """Raise where a table would be made by a CUDA graph, which computes nothing until it is replayed."""
    if device.type != "cpu" and is_capturing(device):
        raise RuntimeError(
            f"pos_encoding_mode: expected a call with {mode!r} before the capture of a CUDA graph, to make the table "
            "that later calls share, got the first one during the capture"
        )


def _finite(name: str, value: float) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number, got {value!r}")
    return float(value)


def _positive(name: str, value: float) -> float:
    if _finite(name, value) <= 0:
        raise ValueError(f"{name}: expected a number above 0, got {value!r}")
    return float(value)
