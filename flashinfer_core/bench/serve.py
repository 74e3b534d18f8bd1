"""Served tokens per second of one attention backend beside another, under an engine with concurrent requests.

The servers run one after the other with the same model, settings and prompts; every request is answered with the
same number of tokens, whatever the model would say.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flashinfer_core.demo.console import console, step
from flashinfer_core.demo.engines import ENGINES
from flashinfer_core.demo.model import prepare_model
from flashinfer_core.demo.server import Server


def served_speed(server: Server, streams: int, tokens: int, rounds: int) -> float:
    """Return the median, over `rounds`, of tokens per second with `streams` requests at once.

    Parameters
    ----------
    server
        A running server.
    streams
        Requests sent together, each with a prompt of its own.
    tokens
        Tokens that each request generates.
    rounds
        Rounds that count; one more before them warms the server up.
    """
    prompts = [f"Write a story about {number} travellers who cross a desert." for number in range(2, streams + 2)]
    speeds = []
    with ThreadPoolExecutor(streams) as pool:
        for _ in range(rounds + 1):
            start = time.monotonic()
            answers = list(pool.map(lambda prompt: server.chat(prompt, tokens, ignore_eos=True), prompts))
            speeds.append(sum(len(answer.tokens) for answer in answers) / (time.monotonic() - start))
    return statistics.median(speeds[1:])


def main(arguments: Sequence[str]) -> int:
    """Measure, print each backend's speed and the ratio of the first to each other, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m flashinfer_core.bench serve", description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="vllm", help="default: %(default)s")
    parser.add_argument("--backends", nargs="+", help="default: ours and the engine's own choice for this machine")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16, ... (default: the model's)")
    parser.add_argument("--streams", type=int, default=8, help="concurrent requests (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per request (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (default: %(default)s)")
    options = parser.parse_args(arguments)
    model = prepare_model()
    engine = ENGINES[options.engine]
    backends = options.backends or [engine.backend, engine.own_backend()]
    speeds: dict[str, float] = {}
    for backend in backends:
        with tempfile.TemporaryDirectory() as folder, step(f"Measuring {backend}") as show:
            settings = (*engine.short_context, *engine.no_prefix_cache, "--dtype", options.dtype)
            log = Path(folder) / "serve.log"
            with Server(engine, model, log, backend=backend, arguments=settings, progress=show) as server:
                if backend == engine.backend:
                    server.confirm_backend()
                speeds[backend] = served_speed(server, options.streams, options.tokens, options.rounds)
    console.print(
        f"{options.streams} requests at once, {options.tokens} tokens each, median of {options.rounds} rounds"
    )
    for backend, speed in speeds.items():
        console.print(f"{backend:20} {speed:8.1f} tokens/s")
    for peer in backends[1:]:
        console.print(f"{backends[0]} / {peer}: {speeds[backends[0]] / speeds[peer]:.2f}")
    return 0
