"""What a kernel is compiled from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from flashinfer_core.jit.sources import device_digest

# Changes when the same source and defines have to give other cubins: another flag, another form of the file.
_FORMAT = "1"


@dataclass(frozen=True)
class KernelSpec:
    """One kernel: a device source file and the macros that make this instance of it.

    Parameters
    ----------
    name
        The instance's name, which states its parameters. The source defines the kernel under the macro
        ``FIC_KERNEL``, so it is also the symbol in the cubin.
    source
        The file, under ``core_kernels/device``: ``"norm/norm.cuh"``.
    defines
        Macros and their values.
    """

    name: str
    source: str
    defines: tuple[tuple[str, str | int], ...] = ()

    def macros(self) -> list[str]:
        """Return every macro as ``NAME=VALUE``."""
        return [f"FIC_KERNEL={self.name}", *(f"{name}={value}" for name, value in self.defines)]

    def text(self) -> str:
        """Return the program that the compiler is given."""
        return f'#include "device/{self.source}"\n'

    def file_name(self, arch: str) -> str:
        """Return the name of its cubin's file, which no other spec, source or architecture has."""
        digest = hashlib.sha256("\0".join([_FORMAT, arch, device_digest(), self.source, *self.macros()]).encode())
        return f"{self.name}.sm_{arch}.{digest.hexdigest()[:16]}.cubin"
