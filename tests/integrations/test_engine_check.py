"""``flashinfer-core check`` with the engine that is installed here."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from flashinfer_core.adapters import ADAPTERS
from flashinfer_core.demo.engines import ENGINES


@pytest.mark.parametrize("engine", ADAPTERS)
def test_installed_engine(engine: str) -> None:
    adapter = ADAPTERS[engine]
    if adapter.distribution() is None:
        pytest.skip(f"{adapter.title} is not installed")
    command = [sys.executable, "-m", "flashinfer_core.cli", "check", engine]
    environment = {**os.environ, **ENGINES[engine].environment()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    flag = f"--attention-backend {ENGINES[engine].backend}"
    assert done.stdout.splitlines()[-1].endswith(f"serves with our backend when it is given {flag}")
