"""Every kernel in common use compiles for every generation of GPUs, and keeps its values in registers."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict

import pytest

from flashinfer_core.jit import KernelSpec, nvrtc
from flashinfer_core.jit.compiler import Compiled, Usage
from flashinfer_core.jit.registry import all_specs

KERNELS = [(arch, spec) for arch in ("80", "89", "90a", "100", "120") for spec in all_specs(arch)]

# Kernels that may use local memory: {(name, arch): (bytes of stack, bytes of spills)} at most, for each thread. The
# tiles of 128 rows hold 32 rows of output and of scores a warp, 192 of the 255 registers. What finds no place are
# values that an item or a block of keys uses once, beside the block's 256 matrix products; smaller blocks without
# spills are slower.
LOCAL_MEMORY: dict[tuple[str, str], tuple[int, int]] = {
    (f"attention_sm80_{dtype}_{tile}", arch): (32, 64)
    for dtype in ("f16", "bf16")
    for tile in ("d128_m128", "d64_m128_k128")
    for arch in ("80", "89", "90a", "100", "120")
}


class Compilations:
    """Compiles everything in processes, and remembers the results of earlier runs of the tests."""

    CACHE = "flashinfer_core/usage"

    def __init__(self, pool: ProcessPoolExecutor, known: dict[str, dict[str, int]]) -> None:
        self.usages = {name: Usage(**usage) for name, usage in known.items()}
        self.compiler = f"NVRTC {nvrtc.version()}"
        self.running: dict[str, Future[Compiled]] = {}
        for arch, spec in KERNELS:
            name = self.name(arch, spec)
            if name not in self.usages:
                self.running[name] = pool.submit(nvrtc.compile_cubin, spec, arch)

    def name(self, arch: str, spec: KernelSpec) -> str:
        return f"{spec.file_name(arch)} by {self.compiler}"

    def usage(self, arch: str, spec: KernelSpec) -> Usage:
        name = self.name(arch, spec)
        if name not in self.usages:
            self.usages[name] = self.running[name].result().usage()
        return self.usages[name]

    def current(self) -> dict[str, dict[str, int]]:
        names = {self.name(arch, spec) for arch, spec in KERNELS}
        return {name: asdict(usage) for name, usage in self.usages.items() if name in names}


@pytest.fixture(scope="module")
def compilations(request: pytest.FixtureRequest, needs_nvrtc: None) -> Iterator[Compilations]:
    cache = request.config.cache
    assert cache is not None
    spawn = multiprocessing.get_context("spawn")  # the test process has threads
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), spawn) as pool:
        compilations = Compilations(pool, cache.get(Compilations.CACHE, {}))
        yield compilations
        pool.shutdown(cancel_futures=True)
    cache.set(Compilations.CACHE, compilations.current())


@pytest.mark.parametrize(("arch", "spec"), KERNELS, ids=[f"{spec.name}-sm_{arch}" for arch, spec in KERNELS])
def test_kernel_compiles_without_local_memory(
    arch: str, spec: KernelSpec, device: str, compilations: Compilations
) -> None:
    if device != "cpu":
        pytest.skip("needs no GPU")
    usage = compilations.usage(arch, spec)
    stack, spills = LOCAL_MEMORY.get((spec.name, arch), (0, 0))
    assert usage.stack_bytes <= stack
    assert usage.spill_bytes <= spills
    assert not usage.serialized


def test_table_of_local_memory_names_kernels() -> None:
    assert set(LOCAL_MEMORY) <= {(spec.name, arch) for arch, spec in KERNELS}
