"""A short check of every kernel on the instruction set of this process: run as a module.

The instruction set is that of the environment variable ``FLASHINFER_CORE_CPU_ISA``, by default the best one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flashinfer_core import _native
from flashinfer_core.testing.ops import ActivationCase, AppendCase, NormCase, RopeCase

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def cases() -> Iterator[NormCase | ActivationCase | RopeCase | AppendCase]:
    """Yield cases that reach every branch of the kernels: each dtype, full vectors and a rest, one thread and many."""
    for dtype in _DTYPES:
        for op in ("rmsnorm", "gemma_rmsnorm", "fused_add_rmsnorm", "layernorm"):
            for weight_dtype in (dtype, torch.float32):
                yield NormCase(op, (2, 3, 333), dtype, weight_dtype, gap=5)
            yield NormCase(op, (50, 1000), dtype)
        for op in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"):
            yield ActivationCase(op, (3, 61), dtype, gap=5)
            yield ActivationCase(op, (50, 1000), dtype)
        for interleave in (False, True):
            yield RopeCase("pos_ids", (5,), (3, 2), 80, 46, interleave, dtype=dtype, gap=3)
            yield RopeCase("cache", (40, 60), interleave=interleave, inplace=True, dtype=dtype, max_position=99)
        for cache_dtype in _DTYPES:
            yield AppendCase(((3, 5), (0, 7)), 4, 3, (61, 40), dtype, cache_dtype, kv_layout="HND", gap=3)


def main() -> None:
    """Check all cases and print the instruction set."""
    checked = 0
    for case in cases():
        case.check()
        checked += 1
    print(f"{_native.cpu_isa()}: {checked} cases")


if __name__ == "__main__":
    main()
