"""Norms over the last dimension.

Every function takes tensors ``[..., hidden]`` of float32, float16 or bfloat16, of any strides with the last one 1. A
weight has shape ``[hidden]`` and the input's dtype or float32. All arithmetic is float32 and is rounded once, when the
result is stored; that includes the product with the weight, which some models round before instead. NaN and infinity
spread over their row as in torch. ``enable_pdl`` is a hint for the scheduling of GPU kernels, without effect on CPU.

Errors: `ValueError` for a shape, dtype or stride, `NotImplementedError` for a tensor that is not on CPU.
"""

from __future__ import annotations

import torch

from flashinfer_core import _native
from flashinfer_core._checks import DTYPE_CODES, check_same_dtype, check_tensor, rows_arg, rows_view
from flashinfer_core._ops import native_op

_NO_ROWS = (0, 0, 0)


def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Root mean square norm: ``out = input / sqrt(mean(input ** 2) + eps) * weight``.

    Parameters
    ----------
    input
        Shape ``[..., hidden]``.
    weight
        Shape ``[hidden]``.
    eps
        Added to the mean square.
    out
        Where to store the result, ``input`` itself included; allocated if None.
    enable_pdl
        Without effect on CPU.

    Returns
    -------
    ``out``, of the input's shape and dtype.

    References
    ----------
    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    return _norm(input, ("weight", weight), None, out, 0.0, eps)


def gemma_rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """RMS norm of the Gemma models, whose weight counts from one: `rmsnorm` with ``1 + weight``.

    Parameters and result are those of `rmsnorm`. The sum ``1 + weight`` is formed in float32.
    """
    return _norm(input, ("weight", weight), None, out, 1.0, eps)


def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Add, then `rmsnorm`, both in place: ``residual += input``, then ``input = rmsnorm(residual)``.

    The norm sees the float32 sum, not its rounding into ``residual``.

    Parameters
    ----------
    input
        Shape ``[..., hidden]``; overwritten with the norm.
    residual
        Shape and dtype of ``input``, in other memory; overwritten with the sum.
    weight
        Shape ``[hidden]``.
    eps
        Added to the mean square.
    enable_pdl
        Without effect on CPU.
    """
    _fused_add(input, residual, weight, 0.0, eps)


def gemma_fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """`fused_add_rmsnorm` with ``1 + weight``, as in the Gemma models; the parameters are the same."""
    _fused_add(input, residual, weight, 1.0, eps)


def layernorm(input: torch.Tensor, gemma: torch.Tensor, beta: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Layer norm: ``(input - mean) / sqrt(variance + eps) * gemma + beta``, the variance being the biased one.

    Parameters
    ----------
    input
        Shape ``[..., hidden]``.
    gemma, beta
        Scale and shift, shape ``[hidden]``, of one dtype.
    eps
        Added to the variance.

    Returns
    -------
    A tensor of the input's shape and dtype.

    References
    ----------
    Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """
    return _norm(input, ("gemma", gemma), beta, None, 0.0, eps)


def _norm(
    input: torch.Tensor,
    named_weight: tuple[str, torch.Tensor],
    beta: torch.Tensor | None,
    out: torch.Tensor | None,
    weight_offset: float,
    eps: float,
) -> torch.Tensor:
    weight_name, weight = named_weight
    check_tensor("input", input, last_dim_contiguous=True)
    _check_weight(weight_name, weight, input)
    if beta is not None:
        _check_weight("beta", beta, input)
        check_same_dtype("beta", beta, weight_name, weight)
    if out is None:
        out = torch.empty_like(input, memory_format=torch.contiguous_format)
    else:
        check_tensor("out", out, dtypes=(input.dtype,), shape=input.shape, last_dim_contiguous=True, writable=True)
    _run_norm(input, out, None, weight, beta, weight_offset, eps)
    return out


def _fused_add(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, weight_offset: float, eps: float
) -> None:
    check_tensor("input", input, last_dim_contiguous=True, writable=True)
    check_tensor(
        "residual", residual, dtypes=(input.dtype,), shape=input.shape, last_dim_contiguous=True, writable=True
    )
    _check_weight("weight", weight, input)
    _run_norm(input, input, residual, weight, None, weight_offset, eps)


def _check_weight(name: str, weight: torch.Tensor, input: torch.Tensor) -> None:
    check_tensor(name, weight, dtypes=(input.dtype, torch.float32), shape=input.shape[-1:], last_dim_contiguous=True)


@native_op(
    "Tensor input, Tensor(a!) out, Tensor(b!)? residual, Tensor weight, Tensor? beta, float weight_offset, float eps"
)
def _run_norm(
    input: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    beta: torch.Tensor | None,
    weight_offset: float,
    eps: float,
) -> None:
    x = rows_view("input", input)
    rows = rows_arg(x)
    residual_rows = _NO_ROWS if residual is None else rows_arg(rows_view("residual", residual))
    if rows[0] == residual_rows[0] and input.numel() > 0:
        raise ValueError("residual: expected other memory than that of input, got the same address")
    outer, inner, dim = (1, *x.shape) if x.dim() == 2 else x.shape
    _native.norm(
        DTYPE_CODES[input.dtype],
        DTYPE_CODES[weight.dtype],
        beta is not None,
        outer,
        inner,
        dim,
        rows,
        rows if out is input else rows_arg(rows_view("out", out)),
        residual_rows,
        weight.data_ptr(),
        0 if beta is None else beta.data_ptr(),
        weight_offset,
        eps,
    )
