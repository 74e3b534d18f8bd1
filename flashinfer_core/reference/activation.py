"""Gated activations, in float32."""

from __future__ import annotations

import torch


def silu_and_mul(input: torch.Tensor) -> torch.Tensor:
    """Return the float32 result of `flashinfer_core.silu_and_mul`."""
    gate, up = input.float().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def gelu_and_mul(input: torch.Tensor) -> torch.Tensor:
    """Return the float32 result of `flashinfer_core.gelu_and_mul`."""
    gate, up = input.float().chunk(2, dim=-1)
    return 0.5 * gate * (1 + torch.erf(gate / 2**0.5)) * up


def gelu_tanh_and_mul(input: torch.Tensor) -> torch.Tensor:
    """Return the float32 result of `flashinfer_core.gelu_tanh_and_mul`."""
    gate, up = input.float().chunk(2, dim=-1)
    return 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
