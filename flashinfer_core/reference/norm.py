"""Norms, in float32."""

from __future__ import annotations

import torch


def rmsnorm(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Return the float32 result of `flashinfer_core.rmsnorm`."""
    x = input.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def gemma_rmsnorm(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Return the float32 result of `flashinfer_core.gemma_rmsnorm`."""
    return rmsnorm(input, 1 + weight.float(), eps)


def fused_add_rmsnorm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `flashinfer_core.fused_add_rmsnorm` writes into input and residual, in float32."""
    total = input.float() + residual.float()
    return rmsnorm(total, weight, eps), total


def gemma_fused_add_rmsnorm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `flashinfer_core.gemma_fused_add_rmsnorm` writes into input and residual, in float32."""
    return fused_add_rmsnorm(input, residual, 1 + weight.float(), eps)


def layernorm(input: torch.Tensor, gemma: torch.Tensor, beta: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Return the float32 result of `flashinfer_core.layernorm`."""
    centred = input.float() - input.float().mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * gemma.float() + beta.float()
