"""The command ``flashinfer-core``."""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from flashinfer_core.adapters import ADAPTERS

_DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    parser = argparse.ArgumentParser(prog="flashinfer-core", description="Kernels for LLM serving.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve-demo", help="serve a small model with an engine and ask it one question")
    serve.add_argument("--engine", choices=ADAPTERS, default="vllm", help="default: %(default)s")
    serve.add_argument("--backend", help="the engine's attention backend (default: that of this library)")
    serve.add_argument("--port", type=int, default=0, help="port on the loopback interface (default: a free one)")
    serve.add_argument("--question", default="What is the capital of France?", help="default: %(default)s")
    serve.add_argument("--once", action="store_true", help="stop after the answer")
    check = commands.add_parser("check", help="say whether an engine would serve with our backend, and if not, why")
    check.add_argument("engine", choices=ADAPTERS)
    show = commands.add_parser(
        "show-config", help="show versions, GPUs, compilers, caches, engines, and what is missing"
    )
    show.add_argument("--json", action="store_true", help="in a form for programs")
    explain = commands.add_parser("explain", help="say which CUDA kernel an attention call runs, and why; needs no GPU")
    explain.add_argument("--capability", type=int, default=90, help="of the GPU, such as 80 (default: %(default)s)")
    explain.add_argument("--dtype", choices=_DTYPES[:2], default="bfloat16", help="of q (default: %(default)s)")
    explain.add_argument("--kv-dtype", choices=_DTYPES, help="default: that of q")
    explain.add_argument("--heads", type=int, default=32, help="default: %(default)s")
    explain.add_argument("--kv-heads", type=int, default=8, help="default: %(default)s")
    explain.add_argument("--head-dim", type=int, default=128, help="default: %(default)s")
    explain.add_argument("--head-dim-vo", type=int, help="default: that of q and K")
    explain.add_argument("--q-len", type=float, default=1, help="query rows of a request, on average (default: 1)")
    explain.add_argument("--page-size", type=int, help="default: no pages")
    explain.add_argument("--backend", choices=("auto", "fa2", "fa3"), default="auto", help="default: %(default)s")
    for name, what in (
        ("soft-cap", "with a soft cap of logits"),
        ("alibi", "with ALiBi"),
        ("mask", "with a custom mask"),
        ("rope", "with rotation on load"),
        ("direct", "tensors whose rows do not begin at multiples of 16 bytes"),
    ):
        explain.add_argument(f"--{name}", action="store_true", help=what)
    aot = commands.add_parser("aot", help="compile the kernels in common use ahead of time; needs no GPU")
    aot.add_argument("--arch", nargs="+", required=True, help="architectures, such as 80 90a 100 120")
    aot.add_argument("--out", type=Path, help="folder of the bundle (default: the one in the package)")
    aot.add_argument("--compiler", choices=("nvrtc", "nvcc"), help="default: the one used at run time")
    aot.add_argument("--jobs", type=int, help="kernels compiled at a time (default: one on each CPU)")
    bench = commands.add_parser("bench", help="measure speed; the same as python -m flashinfer_core.bench")
    bench.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if options.command == "bench":
        from flashinfer_core.bench.__main__ import main as bench_main

        return bench_main(options.arguments)
    if options.command == "show-config":
        return _show_config(options)
    if options.command == "aot":
        return _aot(options)
    if options.command == "check":
        return _check(options)
    if options.command == "explain":
        return _explain(options)
    return _serve_demo(options)


def _show_config(options: argparse.Namespace) -> int:
    from flashinfer_core.config import collect, to_text

    config = collect()
    print(json.dumps(config, indent=2) if options.json else to_text(config))
    return 0


def _check(options: argparse.Namespace) -> int:
    from flashinfer_core.check import check

    works, answer = check(options.engine)
    print(answer)
    return 0 if works else 1


def _explain(options: argparse.Namespace) -> int:
    import torch

    from flashinfer_core._checks import check_int
    from flashinfer_core.attention.explain import explain
    from flashinfer_core.attention.kernels import Features, Variant
    from flashinfer_core.attention.plan import MAX_HEAD_DIM
    from flashinfer_core.attention.tiles import tile_name

    dim_vo = options.head_dim if options.head_dim_vo is None else options.head_dim_vo
    q, kv = (getattr(torch, name) for name in (options.dtype, options.kv_dtype or options.dtype))
    features = Features(*(getattr(options, name) for name in Features._fields))
    try:
        check_int("kv_heads", options.kv_heads, 1)
        check_int("page_size", 1 if options.page_size is None else options.page_size, 1)
        for name, dim in (("head_dim", options.head_dim), ("head_dim_vo", dim_vo)):
            check_int(name, dim, 1, MAX_HEAD_DIM)
        if options.heads < 1 or options.heads % options.kv_heads != 0:
            raise ValueError(f"heads: expected a multiple of kv_heads = {options.kv_heads}, got {options.heads}")
        tile = tile_name(options.q_len * options.heads / options.kv_heads)
        variant = Variant(q, kv, q, options.head_dim, dim_vo, tile, features)
        told = explain(variant, capability=options.capability, page_size=options.page_size, backend=options.backend)
    except (NotImplementedError, ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name, text in told.items():
        print(f"{name:8}{text}")
    return 0


def _aot(options: argparse.Namespace) -> int:
    from flashinfer_core.jit import bundle
    from flashinfer_core.jit.aot import aot

    try:
        aot(options.arch, options.out or bundle.folder(), options.compiler, options.jobs)
    except (RuntimeError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _serve_demo(options: argparse.Namespace) -> int:
    try:
        from flashinfer_core.demo import DemoError
        from flashinfer_core.demo.serve import serve_demo
    except ModuleNotFoundError as error:
        print(f"error: {error}; the demo needs more: pip install 'flashinfer-core[demo]'", file=sys.stderr)
        return 1
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # whatever ends us must end the server too
        signal.signal(number, signal.default_int_handler)
    try:
        serve_demo(options.engine, options.backend, options.port, options.question, options.once)
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
