"""``flashinfer-core aot``: compiles the kernels in common use ahead of time, on a machine with or without a GPU."""

from __future__ import annotations

import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from flashinfer_core.jit import cache, nvcc, nvrtc
from flashinfer_core.jit.compiler import CompileError, choose
from flashinfer_core.jit.registry import all_specs
from flashinfer_core.jit.spec import KernelSpec


@dataclass(frozen=True)
class Job:
    """One cubin to make."""

    spec: KernelSpec
    arch: str
    path: Path

    def __str__(self) -> str:
        return f"{self.spec.name} for sm_{self.arch}"


def aot(archs: Sequence[str], out: Path, compiler: str | None = None, jobs: int | None = None) -> None:
    """Make a folder hold the cubins of `all_specs`. Those that it has are kept, those of older sources removed.

    Parameters
    ----------
    archs
        Architectures: ``"80"``, ``"90a"``.
    out
        The folder.
    compiler
        ``"nvcc"``, through ninja, or ``"nvrtc"``; None for the one that would compile at run time.
    jobs
        Kernels compiled at a time; None for one on each CPU.

    Raises
    ------
    ValueError
        An architecture is none.
    CompileError
        Kernels did not compile; the others have been written.
    RuntimeError
        There is no compiler, or no ninja.
    """
    for arch in archs:
        if not re.fullmatch(r"\d{2,3}a?", arch):
            raise ValueError(f"arch: expected a number such as 80 or 90a, got {arch!r}")
    start = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    bundle = [Job(spec, arch, out / spec.file_name(arch)) for arch in archs for spec in all_specs(arch)]
    missing = [job for job in bundle if cache.read(job.path) is None]
    if missing:
        failures = _compiler(compiler)(missing, jobs or len(os.sched_getaffinity(0)))
        if failures:
            raise CompileError("\n".join([*failures, f"{len(failures)} of {len(missing)} kernels did not compile"]))
    for job in bundle:
        for other in out.glob(f"{job.spec.name}.sm_{job.arch}.*"):
            if other != job.path:
                other.unlink()
    megabytes = sum(job.path.stat().st_size for job in bundle) / 1e6
    seconds = time.perf_counter() - start
    print(f"{out}: {len(bundle)} kernels, {megabytes:.1f} MB; compiled {len(missing)} of them in {seconds:.1f} s")


def _compiler(name: str | None) -> Callable[[list[Job], int], list[str]]:
    """Return a function that compiles so many jobs at a time and returns what it has to say about those that failed."""
    nvcc_chosen = name == "nvcc" or (name is None and choose() is nvcc.compile_cubin)
    return _compile_with_ninja if nvcc_chosen else _compile_in_processes


def _compile_in_processes(jobs: list[Job], at_a_time: int) -> list[str]:
    """Compile with NVRTC, which uses one CPU of a process however many threads call it."""
    nvrtc.version()  # fails here if there is none
    with ProcessPoolExecutor(at_a_time, multiprocessing.get_context("fork")) as pool:
        futures = [pool.submit(_compile, job) for job in jobs]
        return [failure for failure in _progress(futures) if failure]


def _compile(job: Job) -> str:
    """Compile one job in a worker; return what went wrong, if anything did."""
    try:
        cache.write(job.path, nvrtc.compile_cubin(job.spec, job.arch).cubin)
    except CompileError as error:
        return str(error)
    return ""


def _progress(futures: list[Future[str]]) -> Iterator[str]:
    """Yield results as they come, with a progress bar on a terminal and else a line for each tenth."""
    results: Iterable[str] = (future.result() for future in as_completed(futures))
    if sys.stdout.isatty():
        try:
            from rich.progress import track
        except ModuleNotFoundError:
            pass
        else:
            yield from track(results, "Compiling kernels", total=len(futures))
            return
    for i, result in enumerate(results, 1):
        if i * 10 // len(futures) > (i - 1) * 10 // len(futures):
            print(f"Compiling kernels: {i} of {len(futures)}", flush=True)
        yield result


def _compile_with_ninja(jobs: list[Job], at_a_time: int) -> list[str]:
    """Compile with nvcc; ninja shows the progress and what nvcc says."""
    ninja = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
    if ninja is None:
        raise RuntimeError("ninja: expected it on PATH, got none; pip install ninja, or choose --compiler nvrtc")
    failures = []
    with tempfile.TemporaryDirectory(prefix="flashinfer_core-") as name:
        folder = Path(name)
        lines = ["rule nvcc", "  command = $command", "  description = nvcc $out"]
        for job in jobs:
            made = f"{job.spec.name}.sm_{job.arch}"
            (folder / f"{made}.cu").write_text(job.spec.text())
            command = nvcc.command(job.spec, job.arch, Path(f"{made}.cu"), Path(f"{made}.cubin"))
            lines += [f"build {made}.cubin: nvcc {made}.cu", f"  command = {shlex.join(command).replace('$', '$$')}"]
        (folder / "build.ninja").write_text("\n".join([*lines, ""]))
        subprocess.run([ninja, "-k", "0", "-j", str(at_a_time)], cwd=folder)
        for job in jobs:
            cubin = folder / f"{job.spec.name}.sm_{job.arch}.cubin"
            if cubin.exists():
                cache.write(job.path, cubin.read_bytes())
            else:
                failures.append(f"{job}: see what nvcc says above")
    return failures
