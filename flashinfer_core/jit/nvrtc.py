"""NVRTC, NVIDIA's compiler as a library: it needs neither a GPU nor a host compiler nor a header."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from functools import cache
from pathlib import Path

import torch

from flashinfer_core import _native
from flashinfer_core.jit.compiler import Compiled, CompileError
from flashinfer_core.jit.sources import include_root
from flashinfer_core.jit.spec import KernelSpec

# Stands for the host compiler's header; the types are those of Linux.
_CSTDINT = b"""#pragma once
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long;
using uintptr_t = unsigned long;
#define INT32_MAX 2147483647
"""


@cache
def find() -> str | None:
    """Return the path of the library, or None.

    It is looked for in the packages that torch installs, in ``CUDA_HOME``, and, by name, where the dynamic loader
    looks. Of several major versions that of torch's CUDA is taken, else the newest.
    """
    nvidia = importlib.util.find_spec("nvidia")
    folders: list[Path] = []
    for package in (nvidia and nvidia.submodule_search_locations) or ():
        folders += [Path(package, "cuda_nvrtc/lib"), *Path(package).glob("cu[0-9]*/lib")]
    home = os.environ.get("CUDA_HOME")
    if home:
        folders += [Path(home, "lib64"), Path(home, "lib")]
    found = [path for folder in folders for path in folder.glob("libnvrtc.so.[0-9][0-9]")]
    if found:
        wanted = (torch.version.cuda or "").partition(".")[0]
        return str(max(found, key=lambda path: (path.suffix == f".{wanted}", path.suffix)))
    for name in ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    return None


def version() -> str:
    """Return the version of the library that was found, such as ``"13.0"``."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return f"{major.value}.{minor.value}"


def install_advice() -> str:
    """Say how to install the library for the CUDA version that the driver, or else torch, has."""
    driver = _native.cuda_driver_version()
    major = str(driver // 1000) if driver else (torch.version.cuda or "").partition(".")[0]
    return f"pip install nvidia-cuda-nvrtc{'-cu12' if major == '12' else ''}"


def compile_cubin(spec: KernelSpec, arch: str) -> Compiled:
    """Compile a kernel; see `flashinfer_core.jit.compile_cubin`."""
    library = _library()
    program = ctypes.c_void_p()
    options = [
        f"--gpu-architecture=sm_{arch}",
        "--std=c++17",
        "--device-as-default-execution-space",  # for the constexpr functions of headers that the host includes too
        f"--include-path={include_root()}",
        *(f"--define-macro={macro}" for macro in spec.macros()),
        "--ptxas-options=-v",
    ]
    headers, header_names = (ctypes.c_char_p * 1)(_CSTDINT), (ctypes.c_char_p * 1)(b"cstdint")
    _check(
        library.nvrtcCreateProgram(
            ctypes.byref(program), spec.text().encode(), f"{spec.name}.cu".encode(), 1, headers, header_names
        )
    )
    try:
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = library.nvrtcCompileProgram(program, len(options), arguments)
        log = _read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if status != 0:
            raise CompileError(f"{spec.name}: NVRTC {version()} did not compile it for sm_{arch}\n{log}")
        return Compiled(_read(program, "CUBIN"), log, "nvrtc")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def _library() -> ctypes.CDLL:
    path = find()
    if path is None:
        raise RuntimeError(f"NVRTC: expected the library, got none; {install_advice()}")
    library = ctypes.CDLL(path)
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def _read(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(_library(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    content = ctypes.create_string_buffer(size.value)
    _check(getattr(_library(), f"nvrtcGet{what}")(program, content))
    return content.raw


def _check(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"NVRTC: {_library().nvrtcGetErrorString(status).decode()}")
