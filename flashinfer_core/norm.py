"""Norms over the last dimension.

Every function takes tensors ``[..., hidden]`` of float32, float16 or bfloat16, of any strides with the last one 1. A
weight has shape ``[hidden]`` and the input's dtype or float32. All arithmetic is float32 and is rounded once, when the
result is stored; that includes the product with the weight, which some models round before instead. NaN and infinity
spread over their row as in torch. ``enable_pdl``: on GPUs from SM90 on the kernel may start before the one ahead of it
in the stream ends, and waits for it there, unless this is False; elsewhere, and on CPU, it has no effect.

Errors: `ValueError` for a shape, dtype, stride or device that does not fit, `NotImplementedError` for a tensor that is
neither on CPU nor on a CUDA device.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flashinfer_core import _native
from flashinfer_core._checks import DTYPE_CODES, check_same_dtype, check_tensor, rows_arg, rows_view
from flashinfer_core._launch import COMMON_DTYPES, DTYPE_NAMES, Spec, cuda_call, fits_vectors
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
        See the module's text.

    Returns
    -------
    ``out``, of the input's shape and dtype.

    References
    ----------
    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    return _norm(input, ("weight", weight), None, out, 0.0, eps, enable_pdl)


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
    return _norm(input, ("weight", weight), None, out, 1.0, eps, enable_pdl)


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
        See the module's text.
    """
    _fused_add(input, residual, weight, 0.0, eps, enable_pdl)


def gemma_fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """`fused_add_rmsnorm` with ``1 + weight``, as in the Gemma models; the parameters are the same."""
    _fused_add(input, residual, weight, 1.0, eps, enable_pdl)


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
    return _norm(input, ("gemma", gemma), beta, None, 0.0, eps, None)


def _norm(
    input: torch.Tensor,
    named_weight: tuple[str, torch.Tensor],
    beta: torch.Tensor | None,
    out: torch.Tensor | None,
    weight_offset: float,
    eps: float,
    enable_pdl: bool | None,
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
        _check_output("out", out, input)
    _run_norm(input, out, None, weight, beta, weight_offset, eps, enable_pdl is not False)
    return out


def _fused_add(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    weight_offset: float,
    eps: float,
    enable_pdl: bool | None,
) -> None:
    check_tensor("input", input, last_dim_contiguous=True, writable=True)
    _check_output("residual", residual, input)
    _check_weight("weight", weight, input)
    _run_norm(input, input, residual, weight, None, weight_offset, eps, enable_pdl is not False)


def _check_output(name: str, t: torch.Tensor, input: torch.Tensor) -> None:
    check_tensor(
        name,
        t,
        dtypes=(input.dtype,),
        shape=input.shape,
        last_dim_contiguous=True,
        writable=True,
        device=input.device,
    )


def _check_weight(name: str, weight: torch.Tensor, input: torch.Tensor) -> None:
    dtypes, shape = (input.dtype, torch.float32), input.shape[-1:]
    check_tensor(name, weight, dtypes=dtypes, shape=shape, last_dim_contiguous=True, device=input.device)


@native_op(
    "Tensor input, Tensor(a!) out, Tensor(b!)? residual, Tensor weight, Tensor? beta, float weight_offset, float eps, "
    "bool pdl"
)
def _run_norm(
    input: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    beta: torch.Tensor | None,
    weight_offset: float,
    eps: float,
    pdl: bool,
) -> None:
    x = rows_view("input", input)
    rows = rows_arg(x)
    out_rows = rows if out is input else rows_arg(rows_view("out", out))
    residual_rows = _NO_ROWS if residual is None else rows_arg(rows_view("residual", residual))
    if rows[0] == residual_rows[0] and input.numel() > 0:
        raise ValueError("residual: expected other memory than that of input, got the same address")
    outer, inner, dim = (1, *x.shape) if x.dim() == 2 else x.shape
    weight_address, beta_address = weight.data_ptr(), 0 if beta is None else beta.data_ptr()
    addresses = rows[0] | out_rows[0] | residual_rows[0] | weight_address | beta_address
    strides = rows[1] | rows[2] | out_rows[1] | out_rows[2] | residual_rows[1] | residual_rows[2]
    kind = "layernorm" if beta is not None else "rmsnorm" if residual is None else "add_rmsnorm"
    vectors = fits_vectors(addresses, strides | dim, input.itemsize)
    _native.norm(
        cuda_call(input, _spec, input.dtype, weight.dtype, kind, vectors=vectors, pdl=pdl),
        DTYPE_CODES[input.dtype],
        DTYPE_CODES[weight.dtype],
        beta is not None,
        outer,
        inner,
        dim,
        rows,
        out_rows,
        residual_rows,
        weight_address,
        beta_address,
        weight_offset,
        eps,
    )


def _spec(dtype: torch.dtype, weight_dtype: torch.dtype, kind: str, vectors: bool) -> Spec:
    return Spec(
        f"{kind}_{DTYPE_NAMES[dtype]}_w{DTYPE_NAMES[weight_dtype]}{'' if vectors else '_scalar'}",
        "norm/norm.cuh",
        (
            ("FIC_DTYPE", DTYPE_CODES[dtype]),
            ("FIC_WEIGHT_DTYPE", DTYPE_CODES[weight_dtype]),
            ("FIC_LAYER", int(kind == "layernorm")),
            ("FIC_ADD", int(kind == "add_rmsnorm")),
            ("FIC_VECTORS", int(vectors)),
        ),
    )


def specs(arch: str) -> Iterator[Spec]:
    """Yield the kernels in common use for an architecture."""
    for dtype in COMMON_DTYPES:
        for kind in ("rmsnorm", "add_rmsnorm", "layernorm"):
            yield _spec(dtype, dtype, kind, True)
