"""Lets SGLang be imported on a machine without a GPU, where its packages of native code do not exist.

On the path of every process that SGLang starts, because those are spawned: Python imports this module before any other.

* torchvision from the package registry is built for CUDA and cannot load its operators beside torch for CPUs; two of
  them are then missing when the package declares their meta functions.
* triton is imported all over SGLang. Without it SGLang has stand-ins of its own, which it installs on macOS only.
"""

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from unittest import mock


class BeforeImport(MetaPathFinder):
    """Prepares what a package needs when it is first looked for, and finds nothing itself."""

    def __init__(self) -> None:
        self.preparations = {"torchvision": declare_operators, "sglang": install_stand_ins}

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Prepare the package if it is one of those."""
        prepare = self.preparations.pop(name, None)  # at once: preparing looks for packages too
        if prepare is not None:
            prepare()
        return None


def declare_operators() -> None:
    """Declare the operators of torchvision that its meta functions are for."""
    import torch

    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def install_stand_ins() -> None:
    """Install SGLang's stand-ins for triton where there is no triton, by telling it that this is macOS."""
    sglang = importlib.util.find_spec("sglang")
    if importlib.util.find_spec("triton") is not None or sglang is None or sglang.submodule_search_locations is None:
        return
    import torch._dynamo
    import torch._inductor.utils  # both look for triton, and must not find a stand-in

    path = f"{sglang.submodule_search_locations[0]}/_platform_stubs.py"
    spec = importlib.util.spec_from_file_location("_platform_stubs", path)
    assert spec is not None
    assert spec.loader is not None
    stubs = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stubs)
    with (
        mock.patch.object(sys, "platform", "darwin"),
        mock.patch("platform.machine", return_value="arm64"),
        mock.patch.object(torch.backends.mps, "is_available", return_value=True),
        mock.patch.object(stubs, "_patch_non_blocking", create=True),
    ):
        stubs.install_platform_stubs()


sys.meta_path.insert(0, BeforeImport())
