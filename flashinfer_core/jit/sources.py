"""The device code: where it is, and what its content is."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from flashinfer_core._folders import PACKAGE


def include_root() -> Path:
    """Return the folder that holds ``device/``: in an installed package its own copy, else that of the source tree."""
    installed = PACKAGE / "_kernels"
    return installed if installed.is_dir() else PACKAGE.parent / "core_kernels"


@cache
def device_digest() -> str:
    """Return a digest of all device code as it was when this process first asked."""
    root = include_root()
    digest = hashlib.sha256()
    for path in sorted(root.glob("device/**/*.*h")):  # .cuh and .h
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
