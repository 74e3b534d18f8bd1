"""The compilers: what they make, what they say, and what is said without them."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_kernel import tiny

from flashinfer_core import _native
from flashinfer_core.jit import CompileError, KernelSpec, NoCompiler, arch_of, compile_cubin, nvcc, nvrtc
from flashinfer_core.jit.compiler import Compiled

ARCHS = ("75", "80", "89", "90a", "100", "120")


@pytest.mark.usefixtures("needs_nvrtc")
@pytest.mark.parametrize("arch", ARCHS)
def test_nvrtc_compiles(arch: str) -> None:
    made = nvrtc.compile_cubin(tiny(1), arch)
    assert made.cubin.startswith(b"\x7fELF")
    assert b"tiny_1" in made.cubin
    usage = made.usage()
    assert 0 < usage.registers <= 32
    assert usage.stack_bytes == usage.spill_bytes == 0


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_nvcc_compiles_the_same_kernel() -> None:
    made = nvcc.compile_cubin(tiny(1), "80")
    assert b"tiny_1" in made.cubin
    ours = nvrtc.compile_cubin(tiny(1), "80")
    if ours.log:  # before CUDA 13.1 NVRTC does not pass on what ptxas says
        assert made.usage() == ours.usage()


@pytest.mark.usefixtures("needs_nvrtc")
def test_defines_make_the_kernel() -> None:
    assert nvrtc.compile_cubin(tiny(1), "80").cubin != nvrtc.compile_cubin(tiny(2), "80").cubin


@pytest.mark.usefixtures("needs_nvrtc")
def test_errors_hold_the_log(kernels: Path) -> None:
    """flashinfer-ai/flashinfer#4410."""
    with pytest.raises(CompileError, match=r"(?s)^wrong: NVRTC .* sm_80.*tiny.cuh.*VALUE"):
        nvrtc.compile_cubin(KernelSpec("wrong", tiny(1).source), "80")
    with pytest.raises(CompileError, match=r"(?s)sm_10\b.*architecture"):
        nvrtc.compile_cubin(tiny(1), "10")


def test_nvcc_errors_hold_the_log(fake_nvcc: object) -> None:
    """flashinfer-ai/flashinfer#4410."""
    with pytest.raises(CompileError, match=r"(?s)^broken: nvcc 99.9 .* sm_80.*error: broken"):
        compile_cubin(KernelSpec("broken", tiny(1).source), "80")


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    ("cuda", "driver", "package"),
    [("13.0", None, "nvidia-cuda-nvrtc,"), ("12.6", None, "nvidia-cuda-nvrtc-cu12,"), ("13.0", 12080, "-cu12,")],
)
def test_without_a_compiler_the_message_says_what_to_install(
    cuda: str, driver: int | None, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flashinfer-ai/flashinfer#1919."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(_native, "cuda_driver_version", lambda: driver)
    with pytest.raises(NoCompiler, match=rf"expected NVRTC or nvcc, got none; pip install \S*{package}"):
        compile_cubin(tiny(1), "80")


def test_the_compiler_can_be_chosen(fake_nvcc: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compile_cubin(tiny(1), "80").compiler == "nvcc"
    monkeypatch.setenv("FLASHINFER_CORE_COMPILER", "gcc")
    with pytest.raises(ValueError, match="FLASHINFER_CORE_COMPILER: expected 'nvrtc' or 'nvcc', got 'gcc'"):
        compile_cubin(tiny(1), "80")
    monkeypatch.setenv("FLASHINFER_CORE_COMPILER", "nvrtc")
    monkeypatch.setattr(nvrtc, "find", lambda: None)
    with pytest.raises(NoCompiler, match="expected NVRTC, got none"):
        compile_cubin(tiny(1), "80")
    monkeypatch.delenv("FLASHINFER_CORE_COMPILER")
    assert compile_cubin(tiny(1), "80").compiler == "nvcc"


@pytest.mark.parametrize(("cuda", "expected"), [("12.9", 12), ("13.0", 13), (None, 13)])
def test_the_library_of_torchs_cuda_is_found(
    cuda: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flashinfer-ai/flashinfer#2195."""
    paths = {12: tmp_path / "cuda_nvrtc/lib/libnvrtc.so.12", 13: tmp_path / "cu13/lib/libnvrtc.so.13"}
    for path in paths.values():
        path.parent.mkdir(parents=True)
        path.touch()
        path.with_name("libnvrtc-builtins.so.12.9").touch()
    nvidia = importlib.machinery.ModuleSpec("nvidia", None, is_package=True)
    nvidia.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", {"nvidia": nvidia}.get)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert nvrtc.find.__wrapped__() == str(paths[expected])


def test_the_library_of_a_toolkit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "lib64" / "libnvrtc.so.13"
    library.parent.mkdir()
    library.touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert nvrtc.find.__wrapped__() == str(library)


def test_architectures() -> None:
    assert [arch_of(capability) for capability in (75, 80, 89, 90, 100, 120)] == list(ARCHS)
    with pytest.raises(NotImplementedError, match=r"expected a GPU of compute capability 7\.5 or later, got 7\.0"):
        arch_of(70)


def test_usage_without_a_report_is_refused() -> None:
    with pytest.raises(ValueError, match="expected the report of ptxas"):
        Compiled(b"", "", "nvrtc").usage()


def test_import_finds_and_loads_no_compiler() -> None:
    code = "import sys, flashinfer_core, flashinfer_core.jit; print('flashinfer_core.jit.nvrtc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
