"""Bad arguments: what a test of refusals needs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch


def refused(
    function: Callable[..., Any], good: dict[str, Any], bad: dict[str, Any], error: type[Exception], name: str
) -> None:
    """Assert that a call is refused with a message that begins with the argument's name, and that it writes nothing."""
    tensors = [t for t in good.values() if isinstance(t, torch.Tensor)]
    before = [t.clone() for t in tensors]
    with pytest.raises(error, match=rf"^{re.escape(name)}(:|=)"):
        function(**{**good, **bad})
    for t, copy in zip(tensors, before, strict=True):
        assert torch.equal(t, copy)


def transposed(t: torch.Tensor) -> torch.Tensor:
    """Return an equal tensor whose last dimension is not contiguous."""
    return t.mT.contiguous().mT if t.dim() > 1 else t.repeat_interleave(2)[::2]


def meta(t: torch.Tensor) -> torch.Tensor:
    """Return the tensor's shape and dtype on a device that no kernel has."""
    return t.to("meta")
