"""Cubins on disk: a file's form, and the folder of the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from flashinfer_core._folders import cache_folder
from flashinfer_core.jit.log import logger

# A file is the cubin and then these bytes and its SHA-256: tools that read cubins read the files as they are.
_MAGIC = b"FICCUBIN"
_TRAILER_BYTES = len(_MAGIC) + hashlib.sha256().digest_size


def kernel_folder() -> Path:
    """Return the folder of compiled kernels in the user's cache."""
    return cache_folder() / "kernels"


def read(path: Path) -> bytes | None:
    """Return the cubin in a file, or None if there is no such file or it is not as it was written."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    cubin, trailer = content[:-_TRAILER_BYTES], content[-_TRAILER_BYTES:]
    if trailer == _trailer(cubin):
        return cubin
    logger.warning("%s is damaged and will not be used", path)
    return None


def write(path: Path, cubin: bytes) -> None:
    """Write a cubin so that other processes see the whole file or none."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(cubin + _trailer(cubin))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def find(name: str) -> bytes | None:
    """Return the cubin of that name from the user's cache, or None."""
    return read(kernel_folder() / name)


def keep(name: str, cubin: bytes) -> None:
    """Write a cubin to the user's cache. Where that fails, a warning says so once."""
    try:
        write(kernel_folder() / name, cubin)
    except OSError as error:
        _warn(error.strerror)


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Keep other processes from making the cubin of that name. Where files cannot be locked they are not kept out."""
    file = None
    try:
        kernel_folder().mkdir(parents=True, exist_ok=True)
        file = (kernel_folder() / f"{name}.lock").open("w")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        _warn(error.strerror)
    try:
        yield
    finally:
        if file is not None:
            file.close()


@cache
def _warn(reason: str) -> None:
    logger.warning(
        "compiled kernels cannot be kept in %s (%s), so every process compiles its own; make room there, or set "
        "FLASHINFER_CORE_CACHE to a folder that can be written",
        kernel_folder(),
        reason,
    )


def _trailer(cubin: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(cubin).digest()
