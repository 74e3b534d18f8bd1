"""The CUDA driver as core_kernels/host/driver.cpp uses it, with a driver that stands for the real one."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_kernel import tiny

from flashinfer_core import _native
from flashinfer_core.jit import cache, load

Run = Callable[..., subprocess.CompletedProcess[str]]
START = """
import struct
from flashinfer_core import _native
from flashinfer_core.jit import load
from tiny_kernel import tiny
params = struct.pack("QQ", 0, 77)
"""


@pytest.mark.skipif(_native.cuda_driver_version() is not None, reason="there is a driver")
def test_without_a_driver_each_entry_says_so() -> None:
    message = r"CUDA: expected an NVIDIA driver, got none \(libcuda.so.1.*\); install the NVIDIA driver .*CPU tensors"
    for call in (
        lambda: _native.cuda_device_count(),
        lambda: _native.cuda_device(0),
        lambda: _native.CudaKernel(b"", "kernel", 0),
        lambda: load(tiny(1), 0),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()


def test_launches(fake_driver: Run) -> None:
    code = """
for device in (0, 1):
    kernel = _native.CudaKernel(b"cubin", "kernel", device)
    kernel.launch((1, 2, 3), 128, 0, 5, params)
    kernel.launch((4, 1, 1), 64, 50000, 0, params, pdl=True)
    kernel.launch((4, 1, 1), 64, 50000, 0, params)
print(kernel.device, kernel.registers, kernel.local_bytes, kernel.static_smem, kernel.occupancy(64, 1000))
"""
    launches = [
        "launch device={0} grid=1,2,3 block=128 smem=0 stream=5 size=77 plain",
        "shared memory raised to 50000",
        "launch device={0} grid=4,1,1 block=64 smem=50000 stream=0 size=77 {1}",
        "launch device={0} grid=4,1,1 block=64 smem=50000 stream=0 size=77 plain",
    ]
    expected = [line.format(device, ("pdl", "plain")[device]) for device in (0, 1) for line in launches]
    got = fake_driver(START + code)
    assert got.stdout.splitlines() == [*expected, "1 14 13 11 1032"], got.stderr


def test_devices(fake_driver: Run) -> None:
    code = """
print(_native.cuda_driver_version(), _native.cuda_device_count())
d = _native.cuda_device(1)
print(d.name, d.compute_capability, d.num_sms, d.max_smem_per_block, d.max_smem_per_sm, d.l2_bytes)
"""
    assert fake_driver(START + code).stdout == "12080 2\nFake 1 80 1016 1097 1081 1038\n"
    none = fake_driver("from flashinfer_core import _native; print(_native.cuda_device_count())", FAKE_NO_DEVICE="1")
    assert none.stdout == "0\n"


def test_copies(fake_driver: Run) -> None:
    """Rows lie one after the other; what lies together is copied as one; memory in use is not written to."""
    code = """
import ctypes, os
source = ctypes.create_string_buffer(b"abcdefghijkl", 12)
target = ctypes.create_string_buffer(100_000)
src, dst = ctypes.addressof(source), ctypes.addressof(target)
_native.copy_to_device([(dst, src, 1, 3, 0), (dst + 3, src + 4, 2, 2, 4), (dst + 9, src + 11, 1, 1, 1)], 5, 1)
print(target.raw[:10])
_native.copy_to_device([(dst, src, 1, 0, 0)], 5, 1)
_native.copy_to_device([(dst, src, 1, 2, 0)], 0, 1)
os.environ["FAKE_BUSY"] = "1"
_native.copy_to_device([(dst, src, 1, 2, 0)], 0, 1)
del os.environ["FAKE_BUSY"]
_native.copy_to_device([(dst, dst, 1, 70_000, 0)], 0, 1)
_native.copy_to_device([(dst, src, 1, 2, 0)], 0, 1)
"""
    assert fake_driver(START + code).stdout.splitlines() == [
        "pinned 65536", "copy bytes=7 stream=5", "copy bytes=1 stream=5", r"b'abcefij\x00\x00l'",
        "copy bytes=2 stream=0",
        "pinned 65536", "copy bytes=2 stream=0",
        "pinned 131072", "copy bytes=70000 stream=0",
        "copy bytes=2 stream=0",
    ]  # fmt: skip


ERRORS = {
    "_native.cuda_device(7)": "cuDeviceGet: CUDA_ERROR_INVALID_DEVICE (of the fake driver)",
    "_native.CudaKernel(b'refused', 'k', 0)": "cuModuleLoadData: CUDA_ERROR_INVALID_IMAGE (of the fake driver)",
    "_native.CudaKernel(b'cubin', 'absent', 0)": "cuModuleGetFunction: CUDA_ERROR_NOT_FOUND (of the fake driver)",
    "kernel.launch((1, 1, 1), 2048, 0, 0, params)": "cuLaunchKernel: CUDA_ERROR_INVALID_VALUE (of the fake driver): "
    "kernel k, grid 1 x 1 x 1, block 2048, 0 bytes of shared memory",
    "kernel.launch((1, 1, 1), 64, 300000, 0, params)": "cuFuncSetAttribute: CUDA_ERROR_INVALID_VALUE "
    "(of the fake driver): kernel k, 300000 bytes of shared memory",
    "kernel.launch((1, 1, 1), 64, 0, 0, params + b'more')": "params: expected the 16 bytes of kernel k, got 20; the "
    "extension and its device code differ in version, install the library again",
}


def test_errors_name_function_and_error(fake_driver: Run) -> None:
    code = "kernel = _native.CudaKernel(b'cubin', 'k', 0)\n"
    for call in ERRORS:
        code += f"try: {call}\nexcept RuntimeError as error: print(error)\n"
    assert fake_driver(START + code).stdout.splitlines() == list(ERRORS.values())


@pytest.mark.usefixtures("needs_nvrtc")
def test_load(fake_driver: Run, kernels: Path) -> None:
    code = """
kernel = load(tiny(1), 0)
assert load(tiny(1), 0) is kernel
assert load(tiny(1), 1).device == 1
kernel.launch((1, 1, 1), 32, 0, 0, params)
"""
    first = fake_driver(START + code, FLASHINFER_CORE_LOG="debug")
    assert "launch device=0" in first.stdout, first.stderr
    assert "sm_90a from nvrtc" in first.stderr
    assert "sm_80 from nvrtc" in first.stderr
    assert first.stderr.count("kernel from memory") == 1
    (kept,) = kernels.glob("*.sm_90a.*.cubin")
    cache.write(kept, b"refused by the driver")
    second = fake_driver(START + code, FLASHINFER_CORE_LOG="debug")
    assert "launch device=0" in second.stdout, second.stderr
    assert "the driver refuses the cubin that was kept, so it is compiled again: cuModuleLoadData" in second.stderr
    assert "sm_90a from nvrtc" in second.stderr
    assert "sm_80 from disk" in second.stderr
    assert cache.read(kept) != b"refused by the driver"


def test_threads_load_once(fake_driver: Run, fake_nvcc: Callable[[], int]) -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    print(len(set(pool.map(lambda _: load(tiny(1), 0), range(8)))))
"""
    assert fake_driver(START + code, FAKE_NVCC_SECONDS="0.2").stdout == "1\n"
    assert fake_nvcc() == 1
