"""What every launch on a GPU needs of torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

# A build of torch for CPUs only lacks the function, and then has no CUDA tensors either.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
"""Return the handle of the stream that torch uses on a device, given by its index."""
