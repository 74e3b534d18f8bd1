"""The wheel, in an environment of its own that has torch, what torch needs, and nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from flashinfer_core.jit import nvrtc

ROOT = Path(__file__).parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]

FIRST_CALL = """
import sys, torch, flashinfer_core
q, k, v = torch.randn(4, 64), torch.randn(33, 2, 64), torch.randn(33, 2, 64)
o = flashinfer_core.single_decode_with_kv_cache(q, k, v)
k, v = (t.repeat_interleave(2, 1).transpose(0, 1) for t in (k, v))
torch.testing.assert_close(o, torch.nn.functional.scaled_dot_product_attention(q[:, None], k, v)[:, 0])
print(flashinfer_core.__file__)
"""

COMPILE = """
from flashinfer_core.jit import cubin_for, registry
spec = min(registry.all_specs("80"), key=lambda spec: spec.name)
assert spec.name.encode() in cubin_for(spec, "80")
"""


@pytest.fixture(scope="module")
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.config.getoption("--device") != "cpu":
        pytest.skip("needs no GPU")
    folder = tmp_path_factory.mktemp("wheel")
    # The build folder is that of the editable install which the Makefile makes: what was compiled for it serves again.
    build = ["--no-deps", "--no-build-isolation", "--config-settings=build-dir=build/{wheel_tag}"]
    subprocess.run([*PIP, "wheel", "--quiet", *build, "--wheel-dir", folder, ROOT], check=True, cwd=ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment from links to the packages that are installed here: to install torch again takes minutes."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for entry in installed_entries("torch", *(["nvidia-cuda-nvrtc"] if nvrtc.find() else [])):
        (packages / entry.name).symlink_to(entry)
    install = ["install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run([*PIP, "--python", folder / "bin" / "python", *install], check=True)
    return folder


def installed_entries(*names: str) -> set[Path]:
    """Return the files and folders in site-packages that belong to some distributions and all that they need."""
    entries: set[Path] = set()
    seen: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # needed on another platform, or by an extra
            continue
        if name in seen:
            continue
        seen.add(name)
        todo += [re.split(r"[^\w.-]", requirement)[0] for requirement in distribution.requires or ()]
        for file in distribution.files or ():
            if file.parts[0] not in ("..", "__pycache__"):
                entries.add(Path(distribution.locate_file(file.parts[0])))
    return entries


def run_in(environment: Path, cwd: Path, program: str, *arguments: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("FLASHINFER_CORE_", "PYTHON"))}
    return subprocess.run(
        [environment / "bin" / program, *arguments],
        cwd=cwd,
        env={**clean, "FLASHINFER_CORE_CACHE": str(cwd / "cache"), "FLASHINFER_CORE_COMPILER": "nvrtc"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


def test_wheel_is_small_and_whole(wheel: Path) -> None:
    """flashinfer-ai/flashinfer#170 and #4035."""
    assert wheel.stat().st_size < 5e6
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
    device = {str(path.relative_to(ROOT / "core_kernels")) for path in (ROOT / "core_kernels/device").rglob("*.*h")}
    assert device
    assert {name.removeprefix("flashinfer_core/_kernels/") for name in names if "/_kernels/" in name} == device
    python = {str(path.relative_to(ROOT)) for path in (ROOT / "flashinfer_core").rglob("*.py")}
    assert python <= names
    tops = {name.partition("/")[0] for name in names}
    ours = {"flashinfer_core", "flashinfer_core_vllm", "flashinfer_core_sglang"}
    assert {top for top in tops if not top.endswith(".dist-info")} == ours


def test_first_use(environment: Path, tmp_path: Path) -> None:
    assert Path(run_in(environment, tmp_path, "python", "-c", FIRST_CALL).strip()).is_relative_to(environment)
    config = json.loads(run_in(environment, tmp_path, "flashinfer-core", "show-config", "--json"))
    assert config["versions"]["flashinfer_core"] == metadata.version("flashinfer-core")
    assert config["engines"]["vllm"] is None  # not visible, though it may be installed here
    assert Path(config["compilers"]["device_code"]).is_relative_to(environment)
    assert not (tmp_path / "cache").exists()


@pytest.mark.skipif(nvrtc.find() is None, reason="NVRTC is not installed")
def test_a_kernel_compiles(environment: Path, tmp_path: Path) -> None:
    """flashinfer-ai/flashinfer#1919 and #1751: without nvcc."""
    run_in(environment, tmp_path, "python", "-c", COMPILE)
    assert list((tmp_path / "cache" / "kernels").glob("*.cubin"))
