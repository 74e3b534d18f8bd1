"""What this installation consists of and what it lacks: the answer of ``flashinfer-core show-config``."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from flashinfer_core import _native
from flashinfer_core.adapters import ADAPTERS, PLUGIN
from flashinfer_core.jit import arch_of, bundle, cache, nvcc, nvrtc, sources

Section = dict[str, Any]


def collect() -> Section:
    """Return what there is, in sections that JSON can hold, and ``advice``, a line for each thing that is missing.

    No engine is imported, nothing compiled, and no GPU given work. A section that cannot be found out holds ``error``
    in place of its values.
    """
    sections: dict[str, Callable[[list[str]], Section]] = {
        "versions": _versions,
        "cpu": _cpu,
        "gpu": _gpu,
        "compilers": _compilers,
        "cache": _cache,
        "bundle": _bundle,
        "engines": _engines,
        "environment": _environment,
    }
    config: Section = {}
    advice: list[str] = []
    for name, section in sections.items():
        try:
            config[name] = section(advice)
        except Exception as error:  # one broken part must not hide the others
            config[name] = {"error": f"{type(error).__name__}: {error}"}
    return {**config, "advice": advice}


def to_text(config: Section) -> str:
    """Return the configuration as it is shown to people."""
    return "\n".join(_lines(config, ""))


def gpu_path(compute_capability: int) -> str:
    """Say which kernels a GPU of this compute capability (90 for 9.0) runs."""
    if compute_capability < 75:
        return f"sm{compute_capability}: none, the kernels need compute capability 7.5"
    limits = ", float16 and float32 only" if compute_capability < 80 else ""
    hopper = "Hopper kernels for prefill (TMA, wgmma), " if compute_capability == 90 else ""
    return f"sm{compute_capability}: {hopper}universal kernels (mma.sync){limits}"


def _versions(advice: list[str]) -> Section:
    driver = _native.cuda_driver_version()
    return {
        "flashinfer_core": metadata.version("flashinfer-core"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda_of_torch": torch.version.cuda,
        "cuda_of_driver": f"{driver // 1000}.{driver % 1000 // 10}" if driver else None,
    }


def _cpu(advice: list[str]) -> Section:
    return {
        "machine": platform.machine(),
        "path": f"CPU kernels, {_native.cpu_isa()}",
        "threads": _native.max_threads(),
    }


def _gpu(advice: list[str]) -> Section:
    if _native.cuda_driver_version() is None:
        advice.append("gpu: no NVIDIA driver, so only CPU tensors work; for CUDA tensors install the driver")
        return {"devices": []}
    devices = [_native.cuda_device(index) for index in range(_native.cuda_device_count())]
    if not devices:
        advice.append("gpu: the driver sees no GPU, so only CPU tensors work; see nvidia-smi and CUDA_VISIBLE_DEVICES")
    elif torch.version.cuda is None:
        advice.append("torch: this build makes no CUDA tensors; install a build of torch for CUDA")
    return {
        "devices": [
            {
                "index": index,
                "name": device.name,
                "compute_capability": f"{device.compute_capability / 10:.1f}",
                "path": gpu_path(device.compute_capability),
            }
            for index, device in enumerate(devices)
        ]
    }


def _compilers(advice: list[str]) -> Section:
    found: Section = {"device_code": str(sources.include_root())}
    for compiler in (nvrtc, nvcc):
        path = compiler.find()
        name = compiler.__name__.rpartition(".")[2]
        found[name] = {"path": path, "version": compiler.version()} if path else None
    if not found["nvrtc"]:
        instead = "nvcc compiles the kernels" if found["nvcc"] else "kernels that are in no bundle cannot be compiled"
        advice.append(f"nvrtc: not found, so {instead}; {nvrtc.install_advice()}")
    return found


def _cache(advice: list[str]) -> Section:
    folder = cache.kernel_folder()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    writable = existing.is_dir() and os.access(existing, os.W_OK)
    if not writable:
        advice.append(f"cache: {existing} cannot be written; set FLASHINFER_CORE_CACHE to a folder that can")
    return {"folder": str(folder), "writable": writable, **_cubins(folder)}


def _bundle(advice: list[str]) -> Section:
    folder = bundle.folder()
    found = _cubins(folder)
    if not found["kernels"]:
        gpus = {_native.cuda_device(i).compute_capability for i in range(_devices())}
        archs = " ".join(arch_of(capability) for capability in sorted(gpus) if capability >= 75) or "80 90a 100 120"
        advice.append(f"bundle: empty, so first use compiles a kernel; flashinfer-core aot --arch {archs} fills it")
    return {"folder": str(folder), **found, "architectures": sorted(_architectures(folder))}


def _engines(advice: list[str]) -> Section:
    found: Section = {}
    for engine, adapter in ADAPTERS.items():
        obstacle, distribution = adapter.obstacle(), adapter.distribution()
        if obstacle is not None:
            advice.append(f"{engine}: {obstacle}")
        found[engine] = distribution and {
            "distribution": distribution[0],
            "version": distribution[1],
            "plugin_registered": adapter.entry_point() is not None,
            "backend": _vllm_backend(distribution[1]) if engine == "vllm" else PLUGIN,
        }
    return found


def _environment(advice: list[str]) -> Section:
    names = ("CUDA_HOME", "CUDA_VISIBLE_DEVICES", *(adapter.allow_list for adapter in ADAPTERS.values()))
    return {name: value for name, value in sorted(os.environ.items()) if name in names or "FLASHINFER_CORE" in name}


def _devices() -> int:
    return _native.cuda_device_count() if _native.cuda_driver_version() else 0


def _cubins(folder: Path) -> Section:
    sizes = [path.stat().st_size for path in folder.glob("*.cubin")]
    return {"kernels": len(sizes), "bytes": sum(sizes)}


def _architectures(folder: Path) -> set[str]:
    return {f"sm_{match[1]}" for path in folder.glob("*.cubin") if (match := re.search(r"\.sm_(\w+)\.", path.name))}


def _vllm_backend(version: str) -> str:
    """Return the name that selects our backend; the older versions know no other than their slot for any."""
    major, minor = (int(number) for number in re.findall(r"\d+", version)[:2])
    return "FLASHINFER_CORE" if (major, minor) >= (0, 32) else "CUSTOM"


def _lines(section: Section, indent: str) -> Iterator[str]:
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{name}"
            yield from _lines(value, indent + "  ")
        elif isinstance(value, list) and value:
            yield f"{indent}{name}"
            for item in value:
                yield f"{indent}  {', '.join(map(str, item.values())) if isinstance(item, dict) else item}"
        elif name == "bytes":
            yield f"{indent + 'size':22}{value / 1e6:.1f} MB"
        else:
            yield f"{indent + name:22}{'none' if value in (None, [], {}) else value}"
