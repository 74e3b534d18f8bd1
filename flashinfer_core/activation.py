"""Gated activations: ``out = activation(input[..., :d]) * input[..., d:]`` with ``d = input.shape[-1] // 2``.

Inputs are float32, float16 or bfloat16 tensors of shape ``[..., 2 d]``, of any ``d`` and any strides with the last one
1. All arithmetic is float32 and is rounded once, when the result is stored. NaN and infinity pass as the formula says.
``enable_pdl``: on GPUs from SM90 on the kernel may start before the one ahead of it in the stream ends, and waits for
it there, unless this is False; elsewhere, and on CPU, it has no effect.

Errors: `ValueError` for a shape, dtype, stride or device that does not fit, `NotImplementedError` for a tensor that is
neither on CPU nor on a CUDA device.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flashinfer_core import _native
from flashinfer_core._checks import DTYPE_CODES, check_tensor, rows_arg, rows_view
from flashinfer_core._launch import COMMON_DTYPES, DTYPE_NAMES, Spec, cuda_call, fits_vectors
from flashinfer_core._ops import native_op

# By the codes of `enum class Activation` in core_kernels/device/activation/params.h.
_NAMES = ("silu", "gelu", "gelu_tanh")
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
        See the module's text.

    Returns
    -------
    ``out``, of the input's dtype.

    References
    ----------
    Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    return _activation(_SILU, input, out, enable_pdl)


def gelu_tanh_and_mul(
    input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    """GeGLU's gate with the tanh form of GELU; parameters and result are those of `silu_and_mul`.

    ``gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))``, as in the Gemma models.

    References
    ----------
    Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
    """
    return _activation(_GELU_TANH, input, out, enable_pdl)


def gelu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None) -> torch.Tensor:
    """GeGLU's gate with exact GELU, ``x / 2 * (1 + erf(x / sqrt(2)))``; see `gelu_tanh_and_mul`."""
    return _activation(_GELU, input, out, enable_pdl)


def _activation(kind: int, input: torch.Tensor, out: torch.Tensor | None, enable_pdl: bool | None) -> torch.Tensor:
    check_tensor("input", input, last_dim_contiguous=True)
    if input.shape[-1] % 2:
        raise ValueError(f"input: expected an even last dimension (gate, then up), got shape {list(input.shape)}")
    shape = (*input.shape[:-1], input.shape[-1] // 2)
    if out is None:
        out = torch.empty(shape, dtype=input.dtype, device=input.device)
    else:
        dtypes, device = (input.dtype,), input.device
        check_tensor("out", out, dtypes=dtypes, shape=shape, last_dim_contiguous=True, writable=True, device=device)
    _run_activation(kind, input, out, enable_pdl is not False)
    return out


@native_op("int kind, Tensor input, Tensor(a!) out, bool pdl")
def _run_activation(kind: int, input: torch.Tensor, out: torch.Tensor, pdl: bool) -> None:
    x, y = rows_view("input", input), rows_view("out", out)
    outer, inner, dim = (1, *y.shape) if y.dim() == 2 else y.shape
    rows, out_rows = rows_arg(x), rows_arg(y)
    strides = rows[1] | rows[2] | out_rows[1] | out_rows[2]
    vectors = fits_vectors(rows[0] | out_rows[0], strides | dim, input.itemsize)
    call = cuda_call(input, _spec, kind, input.dtype, vectors=vectors, pdl=pdl)
    _native.activation(call, DTYPE_CODES[input.dtype], kind, outer, inner, dim, rows, out_rows)


def _spec(kind: int, dtype: torch.dtype, vectors: bool) -> Spec:
    return Spec(
        f"{_NAMES[kind]}_and_mul_{DTYPE_NAMES[dtype]}{'' if vectors else '_scalar'}",
        "activation/activation.cuh",
        (("FIC_DTYPE", DTYPE_CODES[dtype]), ("FIC_KIND", kind), ("FIC_VECTORS", int(vectors))),
    )


def specs(arch: str) -> Iterator[Spec]:
    """Yield the kernels in common use for an architecture."""
    for dtype in COMMON_DTYPES:
        for kind in range(len(_NAMES)):
            yield _spec(kind, dtype, True)
