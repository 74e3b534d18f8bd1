"""Gated activations: ``out = activation(input[..., :d]) * input[..., d:]`` with ``d = input.shape[-1] // 2``.

Inputs are float32, float16 or bfloat16 tensors of shape ``[..., 2 d]``, of any ``d`` and any strides with the last one
1. All arithmetic is float32 and is rounded once, when the result is stored. NaN and infinity pass as the formula says.
``enable_pdl`` is a hint for the scheduling of GPU kernels, without effect on CPU.

Errors: `ValueError` for a shape, dtype or stride, `NotImplementedError` for a tensor that is not on CPU.
"""

from __future__ import annotations

import torch

from flashinfer_core import _native
from flashinfer_core._checks import DTYPE_CODES, check_tensor, rows_arg, rows_view
from flashinfer_core._ops import native_op

# The codes of `enum class Activation` in core_kernels/cpu/params_ops.h.
_SILU, _GELU, _GELU_TANH = range(3)


def silu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None) -> torch.Tensor:
    """SwiGLU's gate: ``silu(gate) * up`` with ``silu(x) = x / (1 + exp(-x))``.

    Parameters
    ----------
    input
        Shape ``[..., 2 d]``: gate, then up.
    out
        Where to store the result, shape ``[..., d]``; allocated if None.
    enable_pdl
        Without effect on CPU.

    Returns
    -------
    ``out``, of the input's dtype.

    References
    ----------
    Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    return _activation(_SILU, input, out)


def gelu_tanh_and_mul(
    input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    """GeGLU's gate with the tanh form of GELU; parameters and result are those of `silu_and_mul`.

    ``gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))``, as in the Gemma models.

    References
    ----------
    Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
    """
    return _activation(_GELU_TANH, input, out)


def gelu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None) -> torch.Tensor:
    """GeGLU's gate with exact GELU, ``x / 2 * (1 + erf(x / sqrt(2)))``; see `gelu_tanh_and_mul`."""
    return _activation(_GELU, input, out)


def _activation(kind: int, input: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    check_tensor("input", input, last_dim_contiguous=True)
    if input.shape[-1] % 2:
        raise ValueError(f"input: expected an even last dimension (gate, then up), got shape {list(input.shape)}")
    shape = (*input.shape[:-1], input.shape[-1] // 2)
    if out is None:
        out = torch.empty(shape, dtype=input.dtype, device=input.device)
    else:
        check_tensor("out", out, dtypes=(input.dtype,), shape=shape, last_dim_contiguous=True, writable=True)
    _run_activation(kind, input, out)
    return out


@native_op("int kind, Tensor input, Tensor(a!) out")
def _run_activation(kind: int, input: torch.Tensor, out: torch.Tensor) -> None:
    x, y = rows_view("input", input), rows_view("out", out)
    outer, inner, dim = (1, *y.shape) if y.dim() == 2 else y.shape
    _native.activation(DTYPE_CODES[input.dtype], kind, outer, inner, dim, rows_arg(x), rows_arg(y))
