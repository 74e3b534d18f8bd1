"""Timing on a GPU: replays of CUDA graphs between events, and the ceilings and the clock that a time is read beside."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flashinfer_core.bench import peers

Call = Callable[[], object]
TOLERANCE = 0.01  # of a result's relative error in norm; rounding to bf16 gives 0.002
_cuda: Any = torch.cuda  # parts of it are not typed


@dataclass(frozen=True)
class Ceilings:
    """What a GPU can do at most."""

    copy_tbs: float  # read plus write
    read_tbs: float
    bf16_tflops: float
    launch_us: float  # a kernel that does nothing, in a graph

    def floor_us(self, operations: float, bytes_read: float, bytes_copied: float = 0.0) -> float:
        """Return the microseconds that no kernel can go below."""
        memory = bytes_read / self.read_tbs + bytes_copied / self.copy_tbs
        return max(operations / self.bf16_tflops / 1e6, memory / 1e6, self.launch_us)


@dataclass(frozen=True)
class Timing:
    """The median time of one call, and the state of the GPU while it ran."""

    us: float
    clock_mhz: int | None = None
    watts: float | None = None


class Telemetry:
    """SM clock and power of a GPU, by the library of its driver; nothing where that cannot be asked."""

    def __init__(self, device: torch.device) -> None:
        self._handle = ctypes.c_void_p()
        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
            self._known = (
                self._nvml.nvmlInit_v2() == 0
                and self._nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self._handle)) == 0
            )
        except (OSError, AttributeError):
            self._known = False

    def read(self) -> tuple[int | None, float | None]:
        """Return megahertz and watts, each None if unknown."""
        clock, power = ctypes.c_uint(), ctypes.c_uint()
        sm_clock = 1  # NVML_CLOCK_SM
        ask = self._known
        has_clock = ask and self._nvml.nvmlDeviceGetClockInfo(self._handle, sm_clock, ctypes.byref(clock)) == 0
        has_power = ask and self._nvml.nvmlDeviceGetPowerUsage(self._handle, ctypes.byref(power)) == 0
        return (clock.value if has_clock else None), (power.value / 1000 if has_power else None)


def capture(call: Call, repeats: int = 1) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of the call, after a first call on a side stream, as capture asks for."""
    stream = _cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    return graph


class Timer:
    """Times calls on one GPU.

    Parameters
    ----------
    device
        The GPU.
    seconds
        About how long the GPU works for each set of calls.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._seconds = seconds
        self._telemetry = Telemetry(device)
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._scratch = torch.zeros(2 * l2_bytes // 4, dtype=torch.int32, device=device)

    def measure(self, calls: dict[str, Call], *, cold: bool, repeats: int = 1) -> dict[str, Timing]:
        """Return the median time of each call, the calls taken in turn.

        Parameters
        ----------
        calls
            What to time, each captured in a graph of its own.
        cold
            Whether to flush the L2 cache before each replay; the flush lies outside of the events.
        repeats
            Calls in a graph, whose time is divided by it: for what takes hardly longer than the launch of a graph.
        """
        graphs = {name: capture(call, repeats) for name, call in calls.items()}
        pilot = self._replay(graphs, 3, cold)
        each = sum(statistics.median(times) for times in pilot.values()) * 1e-6
        rounds = min(max(int(self._seconds / each), 10), 200)
        times = self._replay(graphs, rounds, cold)
        # The queue is empty now, so the clock is asked for while one more round keeps the GPU busy.
        for graph in graphs.values():
            for _ in range(min(max(int(0.02 / each), 1), 200)):
                graph.replay()
        clock, watts = self._telemetry.read()
        torch.cuda.synchronize()
        return {name: Timing(statistics.median(taken) / repeats, clock, watts) for name, taken in times.items()}

    def _replay(self, graphs: dict[str, torch.cuda.CUDAGraph], rounds: int, cold: bool) -> dict[str, list[float]]:
        """Return the microseconds of each replay. All are queued at once, so that no event waits for the host."""
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
        for _ in range(rounds):
            for name, graph in graphs.items():
                start, end = (_cuda.Event(enable_timing=True) for _ in range(2))
                if cold:  # by reading: lines that a flush wrote would be written back at the cost of the call
                    self._scratch.sum()
                start.record()
                graph.replay()
                end.record()
                events[name].append((start, end))
        torch.cuda.synchronize()
        return {name: [1000 * start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}


def compare(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise unless the norm of the difference is small beside that of what is expected."""
    error = float((actual.float() - expected.float()).norm() / expected.float().norm())
    if not error < TOLERANCE:
        raise RuntimeError(f"{name}: expected a relative error below {TOLERANCE}, got {error:.4f}")


def ceilings(timer: Timer, device: torch.device, measured: bool) -> Ceilings:
    """Return the ceilings recorded for an H200, or those of this GPU, measured."""
    if not measured and "H200" in torch.cuda.get_device_name(device):
        return Ceilings(**peers.recorded()["ceilings"])
    x = torch.empty(1 << 28, dtype=torch.float32, device=device)
    y = torch.empty_like(x)
    a, b = torch.randn(2, 8192, 8192, dtype=torch.bfloat16, device=device)
    c = torch.empty_like(a)
    calls: dict[str, Call] = {
        "copy": lambda: y.copy_(x),
        "read": lambda: x.sum(),
        "matmul": lambda: torch.mm(a, b, out=c),
    }
    us = {name: timing.us for name, timing in timer.measure(calls, cold=True).items()}
    launch = timer.measure({"launch": lambda: _cuda._sleep(0)}, cold=False, repeats=50)["launch"].us
    size = x.numel() * x.element_size()
    return Ceilings(2 * size / us["copy"] / 1e6, size / us["read"] / 1e6, 2 * 8192**3 / us["matmul"] / 1e6, launch)
