"""The kernels use torch's own OpenMP team and follow its size."""

from __future__ import annotations

import subprocess
import sys

import torch

import flashinfer_core
from flashinfer_core import _native


def test_threads_follow_torch() -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 3, 2):
            torch.set_num_threads(threads)
            assert _native.max_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_one_openmp_runtime_in_the_process() -> None:
    """A second runtime's idle threads would spin against torch's."""
    code = """
import re, torch, flashinfer_core
from flashinfer_core import _native
torch.set_num_threads(2)
x = torch.randn(512, 4096)
flashinfer_core.rmsnorm(x, torch.ones(4096)); x @ x.T
maps = open("/proc/self/maps").read()
print(*{path for path in re.findall(r"/\\S*lib(?:gomp|omp|iomp5)\\S*", maps)})
print(_native.openmp_runtime())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, used = run.stdout.strip().split("\n")
    assert loaded == used


def test_thread_count_does_not_change_elementwise_results() -> None:
    x, weight = torch.randn(300, 1000), torch.randn(1000)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(flashinfer_core.rmsnorm(x, weight))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], result) for result in results)
