"""The kernels in common use: those that a bundle holds and that the tests compile for every architecture."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable

from flashinfer_core.jit.spec import KernelSpec

# ``module:function`` of each operation. The function takes an architecture, such as "90a", and returns its kernels.
OPERATIONS: tuple[str, ...] = (
    "flashinfer_core.attention.kernels:specs",
    "flashinfer_core.activation:specs",
    "flashinfer_core.norm:specs",
    "flashinfer_core.quantization:specs",
    "flashinfer_core._merge:specs",
    "flashinfer_core._page:specs",
    "flashinfer_core._rope:specs",
)


def all_specs(arch: str) -> list[KernelSpec]:
    """Return the kernels of all operations for an architecture.

    Raises
    ------
    ValueError
        Two of them have one name.
    """
    specs: dict[str, KernelSpec] = {}
    for operation in OPERATIONS:
        module, _, function = operation.partition(":")
        listed: Callable[[str], Iterable[KernelSpec]] = getattr(importlib.import_module(module), function)
        for spec in listed(arch):
            if specs.setdefault(spec.name, spec) != spec:
                raise ValueError(f"{operation}: expected a name for each kernel, got {spec.name} for two that differ")
    return list(specs.values())
