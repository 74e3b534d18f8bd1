"""Small helpers of callers."""

from __future__ import annotations

import torch

from flashinfer_core._checks import INDEX_DTYPES, check_tensor
from flashinfer_core.attention.options import get_alibi_slopes

__all__ = ["get_alibi_slopes", "get_indptr"]


def get_indptr(x: torch.Tensor) -> torch.Tensor:
    """Return where each of consecutive runs begins, and where the last ends.

    Parameters
    ----------
    x
        The runs' lengths, ``[n]`` int32 or int64.

    Returns
    -------
    torch.Tensor
        int64 ``[n + 1]``, from 0. The wrappers' `plan` takes it as int32.

    Examples
    --------
    >>> get_indptr(torch.tensor([3, 0, 2]))
    tensor([0, 3, 3, 5])
    """
    check_tensor("x", x, dtypes=INDEX_DTYPES, ndim=1)
    return torch.nn.functional.pad(x.cumsum(0), (1, 0))
