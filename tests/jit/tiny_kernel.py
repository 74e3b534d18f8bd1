"""A kernel that is compiled in a twentieth of a second."""

from flashinfer_core.jit import KernelSpec


def tiny(value: int) -> KernelSpec:
    """Return a kernel that stores one value; see data/tiny.cuh."""
    return KernelSpec(f"tiny_{value}", "../../tests/jit/data/tiny.cuh", (("VALUE", value),))
