"""From a kernel's spec to a kernel on a GPU.

A cubin is looked for in the user's cache folder, then in the bundle of the installed package; if it is in neither it is
compiled, in about a second, and kept in the cache. Importing this package compiles nothing and asks no GPU.
"""

from __future__ import annotations

import threading
import time

from flashinfer_core import _native
from flashinfer_core.jit import bundle, cache
from flashinfer_core.jit.compiler import Compiled, CompileError, NoCompiler, arch_of, compile_cubin
from flashinfer_core.jit.log import configure, logger
from flashinfer_core.jit.spec import KernelSpec

__all__ = ["CompileError", "Compiled", "KernelSpec", "NoCompiler", "arch_of", "compile_cubin", "cubin_for", "load"]

_kernels: dict[tuple[KernelSpec, int], _native.CudaKernel] = {}
_loading = threading.Lock()

# Errors of cuModuleLoadData about the cubin itself: it was compiled for another GPU or by a compiler too new for the
# driver, as happens where machines share a cache folder.
_REFUSED = ("CUDA_ERROR_INVALID_IMAGE", "CUDA_ERROR_NO_BINARY_FOR_GPU", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION")

configure()


def load(spec: KernelSpec, device: int) -> _native.CudaKernel:
    """Return a kernel, ready to launch on a GPU, for the life of the process.

    Parameters
    ----------
    spec
        The kernel.
    device
        The GPU's index, as in ``cuda:0``.

    Raises
    ------
    RuntimeError
        No driver, no compiler, no memory, or it does not compile (`CompileError`).
    NotImplementedError
        The GPU is older than SM75.
    """
    key = (spec, device)
    kernel = _kernels.get(key)
    if kernel is not None:
        logger.debug("%s: kernel from memory", spec.name)
        return kernel
    with _loading:
        kernel = _kernels.get(key)
        if kernel is None:
            kernel = _kernels[key] = _load(spec, device)
        return kernel


def cubin_for(spec: KernelSpec, arch: str) -> bytes:
    """Return a kernel's cubin from the first place that has it: the user's cache, the bundle, the compiler.

    Needs no GPU; for the parameters and errors see `compile_cubin`.
    """
    return _find(spec, arch) or _make(spec, arch)


def _load(spec: KernelSpec, device: int) -> _native.CudaKernel:
    arch = arch_of(_native.cuda_device(device).compute_capability)
    cubin = _find(spec, arch)
    if cubin is not None:
        try:
            return _native.CudaKernel(cubin, spec.name, device)
        except RuntimeError as error:
            if not any(refusal in str(error) for refusal in _REFUSED):
                raise
            logger.warning(
                "%s: the driver refuses the cubin that was kept, so it is compiled again: %s", spec.name, error
            )
    return _native.CudaKernel(_make(spec, arch, refused=cubin), spec.name, device)


def _find(spec: KernelSpec, arch: str) -> bytes | None:
    start = time.perf_counter()
    cubin, where = cache.find(spec.file_name(arch)), "disk"
    if cubin is None:
        cubin, where = bundle.find(spec, arch), "bundle"
    if cubin is not None:
        _log_source(spec, arch, where, start)
    return cubin


def _make(spec: KernelSpec, arch: str, refused: bytes | None = None) -> bytes:
    """Compile a kernel, while other processes that need it too wait for the result in the cache."""
    start = time.perf_counter()
    name = spec.file_name(arch)
    with cache.locked(name):
        cubin = cache.find(name)
        if cubin is not None and cubin != refused:
            _log_source(spec, arch, "disk", start)
            return cubin
        try:
            compiled = compile_cubin(spec, arch)
        except NoCompiler:
            cubin = bundle.find_compatible(spec, arch)
            if cubin is None:
                raise
            _log_source(spec, arch, "bundle (of an older GPU)", start)
            return cubin
        _log_source(spec, arch, compiled.compiler, start)
        cache.keep(name, compiled.cubin)
        return compiled.cubin


def _log_source(spec: KernelSpec, arch: str, where: str, start: float) -> None:
    milliseconds = (time.perf_counter() - start) * 1e3
    logger.debug("%s: cubin for sm_%s from %s in %.1f ms", spec.name, arch, where, milliseconds)
