"""Where a cubin comes from, and what happens where it cannot be kept or was damaged."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_kernel import tiny

from flashinfer_core.jit import NoCompiler, bundle, cache, cubin_for, sources

Count = Callable[[], int]


@pytest.fixture(autouse=True)
def _warnings_come_anew() -> Iterator[None]:
    cache._warn.cache_clear()
    yield
    cache._warn.cache_clear()


def test_compiled_once_then_from_disk(kernels: Path, fake_nvcc: Count, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "flashinfer_core")
    made = cubin_for(tiny(1), "80")
    assert made == b"cubin of tiny_1.cubin"
    assert cubin_for(tiny(1), "80") == made
    assert fake_nvcc() == 1
    assert [path.name for path in kernels.glob("*.cubin")] == [tiny(1).file_name("80")]
    compiled, read = caplog.messages
    assert compiled.startswith("tiny_1: cubin for sm_80 from nvcc in ")
    assert read.startswith("tiny_1: cubin for sm_80 from disk in ")
    cubin_for(tiny(1), "90a")
    cubin_for(tiny(2), "80")
    assert fake_nvcc() == 3


def test_another_source_is_another_kernel(kernels: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = tmp_path / "core_kernels" / "device" / "norm"
    device.mkdir(parents=True)
    header = device / "params.h"
    header.write_text("1")
    monkeypatch.setattr(sources, "PACKAGE", tmp_path / "flashinfer_core")
    names = set()
    for content in ("1", "2"):
        header.write_text(content)
        sources.device_digest.cache_clear()
        names.add(tiny(1).file_name("80"))
    sources.device_digest.cache_clear()
    assert len(names) == 2


@pytest.mark.parametrize("damage", [lambda content: content[:-5], lambda content: b"X" + content[1:], lambda _: b""])
def test_damaged_file_is_made_again(
    damage: Callable[[bytes], bytes], kernels: Path, fake_nvcc: Count, caplog: pytest.LogCaptureFixture
) -> None:
    made = cubin_for(tiny(1), "80")
    path = kernels / tiny(1).file_name("80")
    intact = path.read_bytes()
    path.write_bytes(damage(intact))
    assert cubin_for(tiny(1), "80") == made
    assert path.read_bytes() == intact
    assert fake_nvcc() == 2
    assert f"{path} is damaged" in caplog.text


def test_processes_that_start_together_compile_once(fake_nvcc: Count, tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from flashinfer_core.jit import cubin_for
from tiny_kernel import tiny
tiny(1).file_name("80")
print("ready", flush=True)
while not Path(sys.argv[1]).exists(): time.sleep(0.01)
print(cubin_for(tiny(1), "80").decode())
"""
    go = tmp_path / "go"
    environment = {**os.environ, "FAKE_NVCC_SECONDS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code, go], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    go.touch()
    assert [process.communicate(timeout=60)[0] for process in processes] == ["cubin of tiny_1.cubin\n"] * 2
    assert fake_nvcc() == 1


def test_full_disk(
    kernels: Path, fake_nvcc: Count, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert [cubin_for(tiny(i), "80") for i in (1, 2)] == [b"cubin of tiny_1.cubin", b"cubin of tiny_2.cubin"]
    (warning,) = caplog.messages
    assert f"cannot be kept in {kernels} (No space left on device)" in warning
    assert "FLASHINFER_CORE_CACHE" in warning
    assert not [path for path in kernels.iterdir() if path.suffix != ".lock"]


@pytest.mark.parametrize("parent", ["/proc", "file"])
def test_folder_that_cannot_be_written(
    parent: str, fake_nvcc: Count, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASHINFER_CORE_CACHE", str(tmp_path / parent / "cache"))
    assert cubin_for(tiny(1), "80") == cubin_for(tiny(1), "80") == b"cubin of tiny_1.cubin"
    assert fake_nvcc() == 2
    assert len(caplog.messages) == 1


def test_a_hit_writes_and_locks_nothing(kernels: Path, fake_nvcc: Count, monkeypatch: pytest.MonkeyPatch) -> None:
    made = cubin_for(tiny(1), "80")
    (kernels / f"{tiny(1).file_name('80')}.lock").unlink()
    monkeypatch.setattr(cache, "locked", lambda name: pytest.fail("locked"))
    assert cubin_for(tiny(1), "80") == made
    assert [path.suffix for path in kernels.iterdir()] == [".cubin"]


def put(spec_value: int, arch: str, cubin: bytes) -> None:
    bundle.folder().mkdir(exist_ok=True)
    cache.write(bundle.folder() / tiny(spec_value).file_name(arch), cubin)


def test_order_is_disk_bundle_compiler(kernels: Path, fake_nvcc: Count) -> None:
    put(1, "80", b"bundled")
    assert cubin_for(tiny(1), "80") == b"bundled"
    kernels.mkdir(parents=True)
    cache.write(kernels / tiny(1).file_name("80"), b"on disk")
    assert cubin_for(tiny(1), "80") == b"on disk"
    assert fake_nvcc() == 0


def test_bundle_of_an_older_gpu_where_nothing_compiles(fake_nvcc: Count, monkeypatch: pytest.MonkeyPatch) -> None:
    """flashinfer-ai/flashinfer#1781: a bundle needs no compiler."""
    put(1, "80", b"for sm_80")
    assert cubin_for(tiny(1), "89") == b"cubin of tiny_1.cubin"  # which uses all that the GPU has
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    monkeypatch.setenv("PATH", "")
    put(2, "80", b"for sm_80")
    assert cubin_for(tiny(2), "89") == b"for sm_80"
    for arch in ("75", "90a", "120"):
        with pytest.raises(NoCompiler):
            cubin_for(tiny(2), arch)


def test_damaged_bundle_is_not_used(fake_nvcc: Count) -> None:
    put(1, "80", b"bundled")
    path = bundle.folder() / tiny(1).file_name("80")
    path.write_bytes(path.read_bytes()[1:])
    assert cubin_for(tiny(1), "80") == b"cubin of tiny_1.cubin"


@pytest.mark.usefixtures("needs_nvrtc")
def test_log_of_a_process(kernels: Path) -> None:
    code = "from flashinfer_core.jit import cubin_for; from tiny_kernel import tiny; cubin_for(tiny(1), '90a')"

    def log(level: str) -> str:
        environment = {**os.environ, "FLASHINFER_CORE_LOG": level, "PYTHONPATH": str(Path(__file__).parent)}
        return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stderr

    assert "flashinfer_core DEBUG: tiny_1: cubin for sm_90a from nvrtc in " in log("debug")
    assert "from disk in " in log("DEBUG")
    assert log("info") == ""
    assert "FLASHINFER_CORE_LOG: expected one of debug, info, warning, got 'loud'" in log("loud")
