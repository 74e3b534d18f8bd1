"""Kernels loaded and launched on a GPU."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from tiny_kernel import tiny

from flashinfer_core import _native, config
from flashinfer_core._cuda import current_stream
from flashinfer_core.jit import load

pytestmark = pytest.mark.usefixtures("kernels")
SIZE = 1000


@pytest.fixture
def gpu(device: str) -> int:
    if device == "cpu":
        pytest.skip("needs a GPU")
    return torch.device(device).index or 0


def output(gpu: int) -> torch.Tensor:
    return torch.full((SIZE + 1,), -1, dtype=torch.int32, device=f"cuda:{gpu}")


def launch(value: int, out: torch.Tensor, *, smem: int = 0, pdl: bool = False) -> None:
    gpu = out.get_device()
    params = struct.pack("qq", out.data_ptr(), SIZE)
    load(tiny(value), gpu).launch((-(-SIZE // 128), 1, 1), 128, smem, current_stream(gpu), params, pdl)


def check(value: int, out: torch.Tensor) -> None:
    assert out.tolist() == [value] * SIZE + [-1]


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("smem", [0, 48 * 1024 + 16, 99 * 1024])
def test_launch(smem: int, pdl: bool, gpu: int) -> None:
    out = output(gpu)
    launch(5, out, smem=smem, pdl=pdl)
    check(5, out)


def test_stream_is_torchs(gpu: int) -> None:
    stream = torch.cuda.Stream(gpu)
    with torch.cuda.stream(stream):
        assert current_stream(gpu) == stream.cuda_stream
        out = output(gpu)
        torch.cuda._sleep(10_000_000)  # what the kernel must wait for
        out.fill_(-1)
        launch(6, out)
    stream.synchronize()
    check(6, out)


def test_thread_without_a_context(gpu: int) -> None:
    out = output(gpu)
    torch.cuda.synchronize(gpu)
    thread = threading.Thread(target=launch, args=(7, out))
    thread.start()
    thread.join()
    check(7, out)


def test_every_gpu_whatever_the_current_one(gpu: int) -> None:
    """flashinfer-ai/flashinfer#452, deepseek-ai/FlashMLA#158."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    current = torch.cuda.current_device()
    for index in range(torch.cuda.device_count()):
        out = output(index)
        launch(8, out)
        check(8, out)
        assert torch.cuda.current_device() == current


@pytest.mark.usefixtures("needs_nvrtc")
def test_first_use_inside_a_graph(gpu: int) -> None:
    out = output(gpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(9, out)
    torch.cuda.synchronize(gpu)
    assert set(out.tolist()) == {-1}
    graph.replay()
    check(9, out)


def test_needs_of_a_kernel(gpu: int) -> None:
    kernel = load(tiny(5), gpu)
    assert kernel.device == gpu
    assert 0 < kernel.registers <= 32
    assert kernel.local_bytes == kernel.static_smem == 0
    assert kernel.occupancy(128, 0) >= 8
    device = _native.cuda_device(gpu)
    assert kernel.occupancy(128, device.max_smem_per_block) == 1
    with pytest.raises(RuntimeError, match=r"cuFuncSetAttribute: CUDA_ERROR_INVALID_VALUE .* bytes of shared memory"):
        kernel.occupancy(128, device.max_smem_per_block + 1024)
    with pytest.raises(RuntimeError, match="expected the 16 bytes of kernel tiny_5, got 8"):
        kernel.launch((1, 1, 1), 32, 0, 0, bytes(8))


def test_properties_are_those_that_torch_sees(gpu: int) -> None:
    device, expected = _native.cuda_device(gpu), torch.cuda.get_device_properties(gpu)
    assert device.name == expected.name
    assert device.compute_capability == expected.major * 10 + expected.minor
    assert device.num_sms == expected.multi_processor_count
    assert device.l2_bytes == expected.L2_cache_size
    assert device.max_smem_per_sm == expected.shared_memory_per_multiprocessor
    assert 48 * 1024 <= device.max_smem_per_block < device.max_smem_per_sm
    assert _native.cuda_device_count() == torch.cuda.device_count()
    assert config.collect()["gpu"]["devices"][gpu]["name"] == expected.name


@pytest.mark.usefixtures("needs_nvrtc")
def test_cold_start_without_nvcc_takes_seconds(gpu: int, tmp_path: Path) -> None:
    """flashinfer-ai/flashinfer#1751."""
    code = """
import sys, time
from flashinfer_core import _native
from flashinfer_core.jit import arch_of, load, registry
gpu = int(sys.argv[1])
specs = registry.all_specs(arch_of(_native.cuda_device(gpu).compute_capability))
spec = next(spec for spec in specs if "bf16_d128_m128" in spec.name)
start = time.perf_counter()
load(spec, gpu)
print(time.perf_counter() - start)
"""
    environment = {**os.environ, "PATH": "/usr/bin:/bin", "FLASHINFER_CORE_LOG": "debug"}
    environment.pop("CUDA_HOME", None)
    got = subprocess.run([sys.executable, "-c", code, str(gpu)], env=environment, capture_output=True, text=True)
    assert "from nvrtc in" in got.stderr
    assert float(got.stdout) < 5
