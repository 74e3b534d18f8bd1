"""Rules of the house: which way imports point, what an import costs, what the native library links."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flashinfer_core
from flashinfer_core import _native

ROOT = Path(__file__).parent.parent
ENGINES = {"vllm", "sglang"}
ADAPTERS = {path.name for path in (ROOT / "integrations").iterdir() if path.is_dir()}


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            assert node.module is not None
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("file", sorted((ROOT / "flashinfer_core").rglob("*.py")), ids=lambda f: f.stem)
def test_the_library_imports_neither_engines_nor_adapters(file: Path) -> None:
    assert not set(imported(file)) & (ENGINES | ADAPTERS)


@pytest.mark.parametrize("adapter", sorted(ADAPTERS))
def test_an_adapter_imports_its_own_engine_only(adapter: str) -> None:
    engine = adapter.rpartition("_")[2]
    for file in (ROOT / "integrations" / adapter).rglob("*.py"):
        assert not set(imported(file)) & (ENGINES - {engine} | ADAPTERS - {adapter})


def test_import_needs_torch_and_numpy_at_most() -> None:
    code = """
import sys, torch, numpy
before = set(sys.modules)
import flashinfer_core
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))
"""
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(got) <= {"flashinfer_core", "_flashinfer_core_editable", "numpy"}


def test_native_code_links_neither_torch_nor_cuda_nor_openmp() -> None:
    """flashinfer-ai/flashinfer#911."""
    linked = subprocess.run(["ldd", _native.__file__], capture_output=True, text=True, check=True).stdout
    assert "libstdc++" in linked
    assert not re.search("libtorch|libc10|libcuda|libgomp|libomp", linked)


@pytest.mark.parametrize(
    "file", [*ROOT.glob("core_kernels/**/*.cpp"), *ROOT.glob("core_kernels/**/*.h")], ids=lambda f: f.name
)
def test_native_files_stay_readable(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 600


@pytest.mark.parametrize("file", sorted((ROOT / "core_kernels" / "cpu").glob("*.cpp")), ids=lambda f: f.name)
def test_kernels_use_no_shared_inline_functions(file: Path) -> None:
    """The linker keeps one copy of an inline library function, and it could be the AVX-512 one: see cpu/vec.h."""
    if file.name != "dispatch.cpp":  # compiled once, for the baseline
        assert "std::" not in file.read_text()


def test_version() -> None:
    assert flashinfer_core.__version__ != "0"
