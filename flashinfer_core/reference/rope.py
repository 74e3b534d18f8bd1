"""Rotary position embedding, in float32."""

from __future__ import annotations

import math

import torch


def rope_frequencies(rotary_dim: int, rope_scale: float = 1, rope_theta: float = 1e4) -> torch.Tensor:
    """Return the radians a position of each pair, ``[rotary_dim / 2]``."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    return (rope_theta**-exponents / rope_scale).float()


def llama31_rope_frequencies(
    rotary_dim: int,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> torch.Tensor:
    """Return Llama 3.1's radians a position of each pair, ``[rotary_dim / 2]``."""
    plain = rope_theta ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    wavelength = 2 * math.pi / plain
    blend = (old_context_len / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blended = (1 - blend) * plain / rope_scale + blend * plain
    scaled = torch.where(wavelength > old_context_len / low_freq_factor, plain / rope_scale, blended)
    return torch.where(wavelength < old_context_len / high_freq_factor, plain, scaled).float()


def positions_of(indptr: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the position of each token of a ragged batch whose requests begin at ``offsets``."""
    starts, ends = indptr.tolist()[:-1], indptr.tolist()[1:]
    return torch.tensor(
        [
            offset + i
            for start, end, offset in zip(starts, ends, offsets.tolist(), strict=True)
            for i in range(end - start)
        ],
        dtype=torch.int64,
    )


def cos_sin_cache(positions: int, frequencies: torch.Tensor) -> torch.Tensor:
    """Return the table ``[positions, rotary_dim]`` of cosines, then sines."""
    angles = torch.arange(positions, device=frequencies.device).float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleave: bool = False) -> torch.Tensor:
    """Rotate ``[tokens, heads, dim]`` by cosines and sines ``[tokens, rotary_dim / 2]``."""
    rotary_dim = 2 * cos.shape[-1]
    rotated, rest = x.float()[..., :rotary_dim], x.float()[..., rotary_dim:]
    if interleave:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
    else:
        a, b = rotated.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    pair = (a * cos - b * sin, b * cos + a * sin)
    rotated = torch.stack(pair, dim=-1).flatten(-2) if interleave else torch.cat(pair, dim=-1)
    return torch.cat([rotated, rest], dim=-1)


def apply_rope(
    x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor, interleave: bool = False
) -> torch.Tensor:
    """Rotate ``[tokens, heads, dim]`` by ``positions * frequencies``."""
    angles = positions.to(x.device).float()[:, None] * frequencies.to(x.device)
    return rotate(x, angles.cos(), angles.sin(), interleave)
