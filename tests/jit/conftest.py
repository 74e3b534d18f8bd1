"""A cache of its own for each test, and compilers and drivers that stand for the real ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flashinfer_core.jit import nvcc, nvrtc

DATA = Path(__file__).parent / "data"

# Writes the output that `-o` names, and leaves a line in the file beside itself: tests count its runs.
FAKE_NVCC = """#!/bin/sh
if [ "$1" = --version ]; then echo "release 99.9,"; exit; fi
echo "$@" >> "$(dirname "$0")/calls"
sleep "${FAKE_NVCC_SECONDS:-0}"
for last in "$@"; do [ "$before" = -o ] && output=$last; before=$last; done
case "$*" in *broken*) echo "error: broken" >&2; exit 1;; esac
printf 'cubin of %s' "$(basename "$output")" > "$output"
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the cache and the bundle empty folders of this test, also for the processes it starts."""
    monkeypatch.setenv("FLASHINFER_CORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FLASHINFER_CORE_BUNDLE", str(tmp_path / "bundle"))
    monkeypatch.delenv("FLASHINFER_CORE_COMPILER", raising=False)
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def fake_nvcc(tmp_path: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Compile with a script; return how often it ran."""
    script = tmp_path / "toolkit" / "bin" / "nvcc"
    script.parent.mkdir(parents=True)
    script.write_text(FAKE_NVCC)
    script.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(script.parent.parent))
    monkeypatch.setenv("FLASHINFER_CORE_COMPILER", "nvcc")
    calls = script.with_name("calls")
    return lambda: len(calls.read_text().splitlines()) if calls.exists() else 0


@pytest.fixture
def no_compiler(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide every compiler of this machine from this process."""
    nvrtc._library.cache_clear()
    monkeypatch.setattr(nvrtc, "find", lambda: None)
    monkeypatch.setattr(nvcc, "find", lambda: None)


@pytest.fixture(scope="session")
def needs_nvrtc() -> None:
    if nvrtc.find() is None:
        pytest.skip("NVRTC is not installed: pip install nvidia-cuda-nvrtc")


@pytest.fixture(scope="session")
def fake_driver(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs Python code in a process whose driver is data/fake_driver.cpp."""
    if request.config.getoption("--device") != "cpu":
        pytest.skip("the real driver is tested")
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("driver")
    library = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, DATA / "fake_driver.cpp"], check=True)

    path = {
        "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "PYTHONPATH": str(Path(__file__).parent),
    }

    def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **path, **environment},
            capture_output=True,
            text=True,
        )

    return run
