"""Compiling: faults that users of such libraries reported, with the right values, as far as no other file has them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_kernel import tiny

from flashinfer_core.cli import main
from flashinfer_core.jit import NoCompiler, compile_cubin, cubin_for, nvrtc

HOLD_THE_LOCK = """
import sys, time
from flashinfer_core.jit import cache
with cache.locked(sys.argv[1]):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_lock_of_a_dead_process(kernels: Path, fake_nvcc: Callable[[], int]) -> None:
    """flashinfer-ai/flashinfer#972: the lock of a process that was killed holds nobody up."""
    name = tiny(1).file_name("80")
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_THE_LOCK, name], env=dict(os.environ), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (kernels / f"{name}.lock").exists()
    assert cubin_for(tiny(1), "80") == b"cubin of tiny_1.cubin"
    assert fake_nvcc() == 1


@pytest.mark.usefixtures("no_compiler")
def test_show_config_without_a_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    """flashinfer-ai/flashinfer#1904."""
    assert main(["show-config"]) == 0
    assert "nvrtc: not found, so kernels that are in no bundle cannot be compiled" in capsys.readouterr().out


def test_cuda_home_that_begins_with_a_colon(fake_nvcc: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#36077: it names no folder, so PATH is looked at, and else the message asks for a folder."""
    toolkit = os.environ["CUDA_HOME"]
    monkeypatch.setenv("CUDA_HOME", f":{toolkit}")
    monkeypatch.setenv("PATH", f"{toolkit}/bin:{os.environ['PATH']}")
    assert compile_cubin(tiny(1), "80").compiler == "nvcc"
    assert fake_nvcc() == 1
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(nvrtc, "find", lambda: None)
    with pytest.raises(NoCompiler, match="set CUDA_HOME to a CUDA toolkit's folder"):
        compile_cubin(tiny(1), "80")
