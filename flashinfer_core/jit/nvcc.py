"""nvcc, the compiler of a CUDA toolkit, which needs a host compiler beside it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from flashinfer_core.jit.compiler import Compiled, CompileError
from flashinfer_core.jit.sources import include_root
from flashinfer_core.jit.spec import KernelSpec


def find() -> str | None:
    """Return the path of nvcc in ``CUDA_HOME`` or else on ``PATH``, or None."""
    home = os.environ.get("CUDA_HOME")
    return (home and shutil.which(f"{home}/bin/nvcc")) or shutil.which("nvcc")


def version() -> str:
    """Return the version of the nvcc that was found, such as ``"13.0"``."""
    output = subprocess.run([_nvcc(), "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\S+),", output)
    return release[1] if release else "unknown"


def command(spec: KernelSpec, arch: str, source: Path, output: Path) -> list[str]:
    """Return the command that compiles a kernel, whose text is in `source`, to the cubin `output`."""
    return [
        _nvcc(),
        "-cubin",
        f"-arch=sm_{arch}",
        "-std=c++17",
        "--expt-relaxed-constexpr",
        f"-I{include_root()}",
        *(f"-D{macro}" for macro in spec.macros()),
        "-o",
        str(output),
        str(source),
    ]


def compile_cubin(spec: KernelSpec, arch: str) -> Compiled:
    """Compile a kernel; see `flashinfer_core.jit.compile_cubin`."""
    with tempfile.TemporaryDirectory(prefix="flashinfer_core-") as folder:
        source, output = Path(folder, f"{spec.name}.cu"), Path(folder, f"{spec.name}.cubin")
        source.write_text(spec.text())
        result = subprocess.run([*command(spec, arch, source, output), "-Xptxas=-v"], capture_output=True, text=True)
        log = result.stdout + result.stderr
        if result.returncode != 0:
            raise CompileError(f"{spec.name}: nvcc {version()} did not compile it for sm_{arch}\n{log}")
        return Compiled(output.read_bytes(), log, "nvcc")


def _nvcc() -> str:
    path = find()
    if path is None:
        raise RuntimeError("nvcc: expected it in CUDA_HOME or on PATH, got none; install a CUDA toolkit")
    return path
