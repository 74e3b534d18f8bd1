"""Bundles: kernels compiled ahead of time, without a GPU."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_kernel import tiny

from flashinfer_core.cli import main
from flashinfer_core.jit import KernelSpec, aot, bundle, cubin_for, nvrtc, registry

SPECS = [tiny(1), tiny(2)]


@pytest.fixture(autouse=True)
def _two_kernels(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "all_specs", lambda arch: SPECS)


def names(*archs: str) -> list[str]:
    return sorted(spec.file_name(arch) for spec in SPECS for arch in archs)


@pytest.mark.parametrize("compiler", ["nvrtc", "nvcc"])
def test_bundle(compiler: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if compiler == "nvrtc" and nvrtc.find() is None:
        pytest.skip("NVRTC is not installed")
    if compiler == "nvcc" and shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    assert main(["aot", "--arch", "80", "90a", "--compiler", compiler, "--jobs", "2"]) == 0
    assert sorted(path.name for path in bundle.folder().iterdir()) == names("80", "90a")
    out = capsys.readouterr().out
    assert "4 kernels" in out
    assert "compiled 4 of them" in out
    assert b"tiny_2" in cubin_for(tiny(2), "90a")
    assert not (tmp_path / "cache").exists()

    (stale := bundle.folder() / "tiny_1.sm_80.0123456789abcdef.cubin").touch()
    assert main(["aot", "--arch", "80", "--compiler", compiler]) == 0
    assert "compiled 0 of them" in capsys.readouterr().out
    assert not stale.exists()
    assert sorted(path.name for path in bundle.folder().iterdir()) == names("80", "90a")


def test_nvcc_through_ninja(
    fake_nvcc: Callable[[], int], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "elsewhere"
    assert main(["aot", "--arch", "80", "--out", str(out)]) == 0
    assert fake_nvcc() == 2
    assert "[2/2] nvcc tiny_" in capfd.readouterr().out
    monkeypatch.setenv("FLASHINFER_CORE_BUNDLE", str(out))
    assert cubin_for(tiny(1), "80") == b"cubin of tiny_1.sm_80.cubin"
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None if name == "ninja" else name)
    assert main(["aot", "--arch", "90a", "--out", str(out)]) == 1
    assert "ninja: expected it on PATH, got none; pip install ninja, or" in capfd.readouterr().err


@pytest.mark.parametrize("compiler", ["nvrtc", "nvcc"])
def test_what_does_not_compile_is_named_and_the_rest_made(
    compiler: str, fake_nvcc: object, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if compiler == "nvrtc" and nvrtc.find() is None:
        pytest.skip("NVRTC is not installed")
    monkeypatch.setattr(aot, "all_specs", lambda arch: [KernelSpec("broken", tiny(1).source), tiny(2)])
    assert main(["aot", "--arch", "80", "--compiler", compiler]) == 1
    shown = capfd.readouterr()
    assert "broken" in shown.err
    assert "1 of 2 kernels did not compile" in shown.err
    assert "error: " in shown.out + shown.err.removeprefix("error: ")
    assert [path.name for path in bundle.folder().iterdir()] == [tiny(2).file_name("80")]


@pytest.mark.parametrize("arch", ["sm_80", "9", "ninety"])
def test_what_is_no_architecture_is_refused(arch: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["aot", "--arch", "80", arch]) == 1
    assert f"arch: expected a number such as 80 or 90a, got '{arch}'" in capsys.readouterr().err


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    for choice in ([], ["--compiler", "nvrtc"], ["--compiler", "nvcc"]):
        assert main(["aot", "--arch", "80", *choice]) == 1
        assert "got none" in capsys.readouterr().err


def first(arch: str) -> list[KernelSpec]:
    return [tiny(1)]


def second(arch: str) -> list[KernelSpec]:
    return SPECS


def clash(arch: str) -> list[KernelSpec]:
    return [KernelSpec(tiny(1).name, "norm/norm.cuh")]


def test_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "OPERATIONS", (f"{__name__}:first", f"{__name__}:second"))
    assert registry.all_specs("80") == SPECS
    monkeypatch.setattr(registry, "OPERATIONS", (*registry.OPERATIONS, f"{__name__}:clash"))
    with pytest.raises(ValueError, match="test_aot:clash: expected a name for each kernel, got tiny_1 for two"):
        registry.all_specs("80")
