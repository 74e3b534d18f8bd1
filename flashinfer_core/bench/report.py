"""What a benchmark of GPU kernels prints and writes."""

from __future__ import annotations

import importlib
import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from flashinfer_core.bench import gpu, peers


@dataclass(frozen=True)
class Result:
    """One measured row."""

    row: str
    us: float
    rate: float
    unit: str
    floor_us: float
    clock_mhz: int | None
    watts: float | None
    measured_us: dict[str, float] = field(default_factory=dict)  # peers in the same run

    @property
    def recorded_us(self) -> dict[str, float]:
        """Recorded times of peers, the fastest first."""
        return peers.recorded_us(self.row)

    def line(self) -> str:
        """Return the row of the table."""
        fastest = next(iter(self.recorded_us.items()), None)
        best = f"{fastest[0]} {fastest[1]:.1f} us" if fastest else "-"
        clock = f"{self.clock_mhz or '-':>5} MHz {'-' if self.watts is None else f'{self.watts:.0f}':>4} W"
        return (
            f"{self.row:36}{self.us:9.1f} us {self.rate:7.0f} {self.unit:8}{self.floor_us / self.us:6.2f} {clock}  "
            f"{best:22}{_ratios(self.recorded_us, self.us)}"
            + "".join(f"  {name}, now: {us:.1f} us ({us / self.us:.2f})" for name, us in self.measured_us.items())
        )


def parser(name: str, description: str) -> ArgumentParser:
    """Return a parser of the options that the benchmarks of GPU kernels share."""
    found = ArgumentParser(prog=f"python -m flashinfer_core.bench {name}", description=description)
    found.add_argument("--rows", default="", metavar="TEXT", help="only rows whose name contains the text")
    found.add_argument("--device", default="cuda", help="which GPU (default: %(default)s)")
    found.add_argument("--seconds", type=float, default=0.2, help="for each row (default: %(default)s)")
    found.add_argument("--measure-ceilings", action="store_true", help="instead of those recorded for an H200")
    found.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    found.add_argument("--plot", type=Path, metavar="FILE", help="draw them there (needs matplotlib)")
    return found


def unusable(options: Namespace) -> str | None:
    """Return why the benchmark cannot run here, if it cannot."""
    if not torch.cuda.is_available() or torch.device(options.device).type != "cuda":
        return "no CUDA device; the kernels for CPUs have benchmarks of their own: cpu and host"
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib: pip install matplotlib"
    return None


def gpu_of(options: Namespace) -> torch.device:
    """Return the GPU that was asked for, by its number."""
    return torch.device("cuda", torch.device(options.device).index or 0)


def start(options: Namespace) -> tuple[gpu.Timer, gpu.Ceilings]:
    """Print what is measured where and how, and return the timer and the ceilings."""
    device = gpu_of(options)
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    timer = gpu.Timer(device, options.seconds)
    ceilings = gpu.ceilings(timer, device, options.measure_ceilings)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    print(
        f"ceilings: read {ceilings.read_tbs:.2f} TB/s, copy {ceilings.copy_tbs:.2f} TB/s, bf16 "
        f"{ceilings.bf16_tflops:.0f} TFLOP/s"
    )
    print(f"recorded times: {peers.recorded()['source']}")
    print(f"{'row':36}{'ours':>12} {'rate':>7} {'':8}{'floor':>6} {'clock':>9} {'power':>6}  ", end="")
    print(f"{'fastest recorded':22}times as fast as")
    return timer, ceilings


def finish(results: Sequence[Result], options: Namespace) -> int:
    """Write what was asked for and return the exit status: 2 if no row was measured."""
    if not results:
        print(f"no row's name contains {options.rows!r}", file=sys.stderr)
        return 2
    if options.json is not None:
        rows = [{**asdict(result), "recorded_us": result.recorded_us} for result in results]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.plot is not None:
        _plot(results, options.plot)
    return 0


def _ratios(recorded_us: dict[str, float], us: float) -> str:
    return "  ".join(f"{name} {theirs / us:.2f}" for name, theirs in recorded_us.items())


def _plot(results: Sequence[Result], file: Path) -> None:
    """Draw how many times as fast as its fastest peer each row is."""
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    bars = []
    for result in reversed(results):
        name, us = min((result.recorded_us | result.measured_us).items(), key=lambda item: item[1], default=("", 0.0))
        if name:
            bars.append((f"{result.row} / {name}", us / result.us))
    figure, axes = pyplot.subplots(figsize=(9, 0.35 * len(bars) + 1), layout="constrained")
    axes.barh([name for name, _ in bars], [ratio for _, ratio in bars])
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlabel("times as fast as the fastest peer")
    figure.savefig(file)
