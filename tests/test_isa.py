"""Every instruction set that this CPU has; a process chooses one, so each runs in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

ISAS = ("baseline", "avx2", "avx512", "avx512_bf16")
SELF_CHECK = "from flashinfer_core.testing.selfcheck import main; main()"


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, subprocess.Popen[str]]]:
    started = {
        isa: subprocess.Popen(
            [sys.executable, "-c", SELF_CHECK],
            env={**os.environ, "FLASHINFER_CORE_CPU_ISA": isa, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for isa in (*ISAS, "mmx")
    }
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("isa", ISAS)
def test_self_check(isa: str, processes: dict[str, subprocess.Popen[str]]) -> None:
    out, err = processes[isa].communicate(timeout=120)
    if "this CPU and this build offer" in err:
        pytest.skip(err.strip().splitlines()[-1])
    assert processes[isa].returncode == 0, err
    assert out.startswith(f"{isa}: ")


def test_unknown_instruction_set_is_refused(processes: dict[str, subprocess.Popen[str]]) -> None:
    _, err = processes["mmx"].communicate(timeout=120)
    assert processes["mmx"].returncode != 0
    assert "FLASHINFER_CORE_CPU_ISA is 'mmx'; this CPU and this build offer: baseline" in err
