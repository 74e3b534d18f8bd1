"""The compilers: NVRTC and nvcc, which make equal kernels."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass

from flashinfer_core.jit.spec import KernelSpec


class NoCompiler(RuntimeError):
    """Neither NVRTC nor nvcc is installed; the message says what to install."""


class CompileError(RuntimeError):
    """Device code did not compile; the message holds the compiler's log."""


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel needs of a multiprocessor, for each thread."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    serialized: bool = False  # whether ptxas says that it had to make each wgmma wait for the one before it


@dataclass(frozen=True)
class Compiled:
    """A cubin, and the log of its compiler, with what ptxas says about each kernel."""

    cubin: bytes
    log: str
    compiler: str

    def usage(self) -> Usage:
        """Return the needs of the kernel, read from the log."""
        numbers = [
            re.search(pattern, self.log)
            for pattern in (r"Used (\d+) registers", r"(\d+) bytes stack frame", r"(\d+) bytes spill stores")
        ]
        found = [int(number[1]) for number in numbers if number is not None]
        if len(found) != len(numbers):
            raise ValueError(f"log: expected the report of ptxas on a kernel, got {self.log!r}")
        registers, stack_bytes, spill_bytes = found
        serialized = re.search(r"\(C75(08|1[0-4])\)", self.log) is not None
        return Usage(registers, stack_bytes, spill_bytes, serialized)


def arch_of(compute_capability: int) -> str:
    """Return the architecture that kernels are compiled for, as in ``sm_90a``, without the ``sm_``.

    It is the GPU's own, so that a kernel uses all that the GPU has. On SM90 alone the architecture-specific form is
    used, since only that has wgmma; elsewhere the plain number, whose cubins run on later GPUs of the same major
    version too.
    """
    if compute_capability < 75:
        raise NotImplementedError(
            f"device: expected a GPU of compute capability 7.5 or later, got {compute_capability / 10:.1f}"
        )
    return "90a" if compute_capability == 90 else str(compute_capability)


def choose() -> Callable[[KernelSpec, str], Compiled]:
    """Return the compiler to use: NVRTC if it is there, else nvcc; ``FLASHINFER_CORE_COMPILER`` names one of them.

    Raises
    ------
    NoCompiler
        There is none.
    """
    from flashinfer_core.jit import nvcc, nvrtc

    wanted = os.environ.get("FLASHINFER_CORE_COMPILER", "")
    if wanted not in ("", "nvrtc", "nvcc"):
        raise ValueError(f"FLASHINFER_CORE_COMPILER: expected 'nvrtc' or 'nvcc', got {wanted!r}")
    if wanted != "nvcc" and nvrtc.find() is not None:
        return nvrtc.compile_cubin
    if wanted != "nvrtc" and nvcc.find() is not None:
        return nvcc.compile_cubin
    what = {"": "NVRTC or nvcc", "nvrtc": "NVRTC", "nvcc": "nvcc"}[wanted]
    raise NoCompiler(
        f"compiler: expected {what}, got none; {nvrtc.install_advice()}, or set CUDA_HOME to a CUDA toolkit's folder"
    )


def compile_cubin(spec: KernelSpec, arch: str) -> Compiled:
    """Compile a kernel.

    Parameters
    ----------
    spec
        The kernel.
    arch
        ``"80"``, ``"90a"``: the architecture without the ``sm_``.

    Raises
    ------
    NoCompiler
        There is no compiler.
    CompileError
        It does not compile.
    """
    return choose()(spec, arch)
