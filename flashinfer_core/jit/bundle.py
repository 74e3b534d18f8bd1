"""Cubins that were compiled ahead of time, by ``flashinfer-core aot``."""

from __future__ import annotations

import os
from pathlib import Path

from flashinfer_core._folders import PACKAGE
from flashinfer_core.jit import cache
from flashinfer_core.jit.spec import KernelSpec


def folder() -> Path:
    """Return the bundle's folder: ``FLASHINFER_CORE_BUNDLE`` if set, else the one in the package."""
    own = os.environ.get("FLASHINFER_CORE_BUNDLE")
    return Path(own).expanduser().absolute() if own else PACKAGE / "_cubins"


def find(spec: KernelSpec, arch: str) -> bytes | None:
    """Return a kernel's cubin for just this architecture, or None."""
    return cache.read(folder() / spec.file_name(arch))


def find_compatible(spec: KernelSpec, arch: str) -> bytes | None:
    """Return a cubin that runs on this architecture although it was compiled for an older one, or None.

    GPUs run cubins of every lower minor version of their own major version.
    """
    number = int(arch.rstrip("a"))
    for older in range(number - 1, number // 10 * 10 - 1, -1):
        cubin = find(spec, str(older))
        if cubin is not None:
            return cubin
    return None
