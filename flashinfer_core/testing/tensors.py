"""Comparing and poisoning tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_POISON = 0xFF  # every byte: NaN in each floating-point format, -1 in each signed integer


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None, slack: float = 1.0
) -> None:
    """Assert that a result is a float32 result rounded once.

    The tolerance is half a unit in the last place of the dtype, plus 1e-5 absolute and relative for the float32
    arithmetic itself. NaN equals NaN, and what overflows the dtype must be infinite.

    Parameters
    ----------
    actual
        The result.
    expected
        The reference's float32 result, of the same shape.
    dtype
        The dtype that was rounded to; that of ``actual`` if None.
    slack
        A factor on the tolerance, for operations with more roundings.
    """
    dtype = actual.dtype if dtype is None else dtype
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    rounded = expected.to(dtype).float()
    target = torch.where(rounded.isinf(), rounded, expected.float())
    half_unit = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    torch.testing.assert_close(
        actual.float(), target, rtol=slack * (half_unit + 1e-5), atol=slack * 1e-5, equal_nan=True
    )


@dataclass(frozen=True)
class Embedded:
    """A tensor inside a larger buffer of poison."""

    view: torch.Tensor
    buffer: torch.Tensor

    def to(self, device: str) -> Embedded:
        """Return the same on another device, poison and strides included."""
        buffer, view = self.buffer.to(device), self.view
        return Embedded(buffer.as_strided(view.shape, view.stride(), view.storage_offset()), buffer)

    def assert_intact(self) -> None:
        """Assert that everything around the tensor still is poison."""
        outside = self.buffer.clone()
        view = self.view
        poison = poisoned(view.shape, view.dtype, str(view.device))
        outside.as_strided(view.shape, view.stride(), view.storage_offset()).copy_(poison)
        assert bool((outside.view(torch.uint8) == _POISON).all()), "memory outside of the tensor was written"


def poisoned(shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Return a contiguous tensor of NaN (floating point) or -1 (integers)."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.full((size,), _POISON, dtype=torch.uint8, device=device).view(dtype).view(*shape)


def embed(t: torch.Tensor, gap: int = 0, offset: int = 0, order: Sequence[int] | None = None) -> Embedded:
    """Copy a tensor into a buffer of poison.

    Parameters
    ----------
    t
        The tensor.
    gap
        Elements of poison after each run of the last dimension, and after each block of every other one.
    offset
        Elements of poison before the first.
    order
        The dimensions from the outermost to the innermost in memory; as they are if None.
    """
    order = range(t.dim()) if order is None else order
    strides, stride = [0] * t.dim(), 1
    for dim in reversed(order):
        strides[dim] = stride
        stride = stride * t.shape[dim] + gap
    buffer = poisoned((offset + stride + gap,), t.dtype, str(t.device))
    view = buffer.as_strided(t.shape, strides, offset)
    view.copy_(t)
    return Embedded(view, buffer)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill what `torch.empty` returns with NaN, so that an element that a kernel leaves out shows."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")  # which is what makes torch.empty fill its memory
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Turn every synchronisation with the GPU into an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
