"""Packing of booleans into bits: the form of the custom attention masks.

Inputs are bool or integer tensors on CPU of one dimension; anything other than 0 counts as 1. ``bitorder`` says
whether the first element of a byte becomes its highest bit (``"big"``, the default) or its lowest (``"little"``, which
attention masks use).

Errors: `ValueError` for a shape, dtype or value, `NotImplementedError` for a tensor that is not on CPU.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from flashinfer_core._checks import INDEX_DTYPES, check_choice, check_tensor

_BitOrder: TypeAlias = Literal["big", "little"]
_BIT_ORDERS = ("big", "little")
_INPUT_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


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
    return torch.from_numpy(np.packbits(_truth(x), bitorder=_bit_order(bitorder)))


def segment_packbits(x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big") -> tuple[torch.Tensor, torch.Tensor]:
    """Pack each segment of x as `packbits` does, so that every segment begins at a byte of its own.

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
    bits, order = _truth(x), _bit_order(bitorder)
    check_tensor("indptr", indptr, dtypes=INDEX_DTYPES, ndim=1)
    starts = indptr.tolist()
    if not starts or starts[0] != 0 or starts[-1] != len(bits):
        raise ValueError(f"indptr: expected values from 0 to the length of x, {len(bits)}, got {_ends(starts)}")
    byte_starts = [0]
    for start, end in pairwise(starts):
        if end < start:
            raise ValueError(f"indptr: expected values that do not decrease, got {end} after {start}")
        byte_starts.append(byte_starts[-1] + (end - start + 7) // 8)
    packed = np.empty(byte_starts[-1], dtype=np.uint8)
    for i in range(len(starts) - 1):
        segment = bits[starts[i] : starts[i + 1]]
        packed[byte_starts[i] : byte_starts[i + 1]] = np.packbits(segment, bitorder=order)
    return torch.from_numpy(packed), torch.tensor(byte_starts, dtype=indptr.dtype, device="cpu")


def _truth(x: torch.Tensor) -> npt.NDArray[np.bool_]:
    check_tensor("x", x, dtypes=_INPUT_DTYPES, ndim=1)
    return cast("npt.NDArray[np.bool_]", (x if x.dtype == torch.bool else x.ne(0)).numpy())


def _bit_order(bitorder: str) -> _BitOrder:
    check_choice("bitorder", bitorder, _BIT_ORDERS)
    return cast("_BitOrder", bitorder)


def _ends(values: list[int]) -> str:
    return f"{values[0]} to {values[-1]}" if values else "no values"
