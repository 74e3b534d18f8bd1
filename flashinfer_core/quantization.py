"""Packing of booleans into bits: the form of the custom attention masks.

Inputs are bool or integer tensors of one dimension, of any stride; anything other than 0 counts as 1. ``bitorder`` says
whether the first element of a byte becomes its highest bit (``"big"``, the default) or its lowest (``"little"``, which
attention masks use).

Errors: `ValueError` for a shape, dtype, device or value that does not fit, `NotImplementedError` for a tensor that is
neither on CPU nor on a CUDA device.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, cast

import numpy as np
import torch

from flashinfer_core import _native
from flashinfer_core._checks import INDEX_DTYPES, check_choice, check_tensor, indices_arg
from flashinfer_core._launch import Spec, cuda_call
from flashinfer_core._ops import native_op

_BIT_ORDERS = ("big", "little")
_INPUT_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_NO_INDICES = (0, False, 0, 0)


def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """Pack elements into the bits of bytes, the last byte filled up with zeros.

    Parameters
    ----------
    x
        ``[n]``, bool or integer.
    bitorder
        ``"big"`` or ``"little"``.

    Returns
    -------
    ``[ceil(n / 8)]`` uint8.
    """
    check_tensor("x", x, dtypes=_INPUT_DTYPES, ndim=1)
    check_choice("bitorder", bitorder, _BIT_ORDERS)
    out = torch.empty((x.shape[0] + 7) // 8, dtype=torch.uint8, device=x.device)
    _run_packbits(x, None, None, bitorder == "little", out)
    return out


def segment_packbits(x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big") -> tuple[torch.Tensor, torch.Tensor]:
    """Pack each segment of x as `packbits` does, so that every segment begins at a byte of its own.

    The size of the result depends on the values of indptr, so on a CUDA device this waits for the GPU.

    Parameters
    ----------
    x
        ``[indptr[-1]]``, bool or integer.
    indptr
        ``[segments + 1]`` int32 or int64, from 0: segment ``i`` is ``x[indptr[i]:indptr[i + 1]]``.
    bitorder
        ``"big"`` or ``"little"``.

    Returns
    -------
    The bytes of all segments, uint8, and where each segment's bytes begin, ``[segments + 1]`` of indptr's dtype.
    """
    check_tensor("x", x, dtypes=_INPUT_DTYPES, ndim=1)
    check_choice("bitorder", bitorder, _BIT_ORDERS)
    check_tensor("indptr", indptr, dtypes=INDEX_DTYPES, ndim=1, device=x.device)
    starts = indptr.tolist()
    if not starts or starts[0] != 0 or starts[-1] != len(x):
        got = f"{starts[0]} to {starts[-1]}" if starts else "no values"
        raise ValueError(f"indptr: expected values from 0 to the length of x, {len(x)}, got {got}")
    for start, end in pairwise(starts):
        if end < start:
            raise ValueError(f"indptr: expected values that do not decrease, got {end} after {start}")
    size = sum((end - start + 7) // 8 for start, end in pairwise(starts))
    return pack_segments(x, indptr, bitorder == "little", size)


def pack_segments(
    x: torch.Tensor, indptr: torch.Tensor, little: bool, size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the work of `segment_packbits` without looking at the values of indptr, so without waiting for the GPU.

    Parameters
    ----------
    x, indptr
        As there. On a CUDA device any indptr is safe: nothing outside of x is read.
    little
        Whether the first element of a byte is its lowest bit.
    size
        Bytes of the result; None for as many as they can be, of which those past the last segment mean nothing.

    Returns
    -------
    As there.
    """
    segments = indptr.shape[0] - 1
    if size is None:
        size = (x.shape[0] + 7 * segments) // 8
    sizes = (indptr.diff() + 7) >> 3
    starts = torch.nn.functional.pad(sizes.cumsum(0, dtype=indptr.dtype), (1, 0))
    out = torch.empty(size, dtype=torch.uint8, device=x.device)
    _run_packbits(x, indptr, starts, little, out)
    return out, starts


@native_op("Tensor x, Tensor? indptr, Tensor? out_indptr, bool little, Tensor(a!) out")
def _run_packbits(
    x: torch.Tensor, indptr: torch.Tensor | None, out_indptr: torch.Tensor | None, little: bool, out: torch.Tensor
) -> None:
    call = cuda_call(x, _spec)
    if call is None:
        _pack_on_cpu(x, indptr, out_indptr, little, out)
        return
    _native.pack_bits(
        call,
        x.data_ptr(),
        x.itemsize,
        x.stride()[0],
        x.shape[0],
        little,
        _NO_INDICES if indptr is None else indices_arg(indptr),
        _NO_INDICES if out_indptr is None else indices_arg(out_indptr),
        out.data_ptr(),
        out.shape[0],
    )


def _pack_on_cpu(
    x: torch.Tensor, indptr: torch.Tensor | None, out_indptr: torch.Tensor | None, little: bool, out: torch.Tensor
) -> None:
    bits, packed = (x if x.dtype == torch.bool else x.ne(0)).numpy(), out.numpy()
    order = cast("Literal['big', 'little']", _BIT_ORDERS[little])
    segments = [0, len(x)] if indptr is None else indptr.tolist()
    starts = [0, len(out)] if out_indptr is None else out_indptr.tolist()
    for (begin, end), (first, last) in zip(pairwise(segments), pairwise(starts), strict=True):
        packed[first:last] = np.packbits(bits[begin:end], bitorder=order)


def _spec(vectors: bool) -> Spec:
    return Spec("packbits", "quantization/packbits.cuh")


def specs(arch: str) -> Iterator[Spec]:
    """Yield the kernels in common use for an architecture."""
    yield _spec(True)
