"""How the small operations find and launch their CUDA kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import TypeAlias

import torch

from flashinfer_core import _native, jit
from flashinfer_core._cuda import current_stream

# Kernel, whether it is the one for 16-byte accesses, stream, programmatic dependent launch. None: tensors on CPU.
Call: TypeAlias = tuple[_native.CudaKernel, bool, int, bool] | None
Spec: TypeAlias = jit.KernelSpec

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
"""The dtypes' names in the names of kernels."""

COMMON_DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
"""Those whose kernels a bundle holds."""


def cuda_call(
    t: torch.Tensor, spec: Callable[..., Spec], *arguments: Hashable, vectors: bool = True, pdl: bool = True
) -> Call:
    """Return what native code needs to launch a kernel on a tensor's device, or None if that is the CPU.

    Parameters
    ----------
    t
        One of the tensors of the call.
    spec, arguments
        The kernel is ``spec(*arguments, vectors)``. It is loaded by the first call with these arguments.
    vectors
        Whether the tensors allow 16-byte accesses, see `fits_vectors`.
    pdl
        Whether the kernel may start before the one ahead of it in the stream ends. It waits before it touches memory,
        so all that this hides is the time of a launch.
    """
    if t.is_cpu:
        return None
    device = t.get_device()
    return _load(spec, device, *arguments, vectors), vectors, current_stream(device), pdl


def fits_vectors(addresses: int, elements: int, itemsize: int, access: int = 16) -> bool:
    """Return whether all of a tensor can be accessed in units of `access` bytes, a power of two.

    Several addresses, and several numbers of elements (strides and the length of a row), come joined by bitwise or.
    """
    return (addresses | elements * itemsize) & (access - 1) == 0


@cache
def _load(spec: Callable[..., Spec], device: int, *arguments: Hashable) -> _native.CudaKernel:
    return jit.load(spec(*arguments), device)
