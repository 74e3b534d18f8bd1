"""SGLang with this backend, offline and over HTTP: the same greedy tokens as SGLang's own on a CPU; faults."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prompts import LONG, SHARED_PREFIX, SHORT

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

from flashinfer_core.demo import DemoError
from flashinfer_core.demo.engines import SGLANG
from flashinfer_core.demo.model import prepare_model
from flashinfer_core.demo.server import Server

OURS, STOCK = SGLANG.backend, "torch_native"
WORKER = Path(__file__).with_name("sglang_worker.py")
PROMPTS = SHORT[:7] + SHARED_PREFIX[:7] + LONG[:6]
ANSWER_TOKENS = 16
LINE = f"Using {OURS} attention backend ("

# Each starts an engine. Of one list they run one after the other, and the lists at the same time, as two cores can.
JOBS: dict[str, list[tuple[str, dict[str, Any], dict[str, str]]]] = {
    "first": [
        ("stock", {"attention_backend": STOCK}, {}),
        (
            "prefill only",
            {"attention_backend": STOCK, "prefill_attention_backend": OURS, "enable_mixed_chunk": True},
            {},
        ),
    ],
    "second": [
        ("chunks", {"attention_backend": OURS, "chunked_prefill_size": 64}, {}),
        (
            "pages of 16, heads first, no overlap",
            {"attention_backend": OURS, "page_size": 16, "chunked_prefill_size": 96, "disable_overlap_schedule": True},
            {"SGLANG_USE_HND_KVCACHE": "1"},
        ),
        ("decode only", {"attention_backend": STOCK, "decode_attention_backend": OURS}, {}),
    ],
}
NAMES = [name for jobs in JOBS.values() for name, _, _ in jobs]
SERVER_ARGUMENTS = (
    *("--dtype", "float32", "--context-length", "2048", "--page-size", "16"),
    # Fewer slots than the prompts have tokens: requests wait for each other.
    *("--max-total-tokens", "1024", "--chunked-prefill-size", "128"),
)


LARGE_HEADS = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 512,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def model() -> Path:
    return prepare_model()


@pytest.fixture(scope="module")
def answers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("sglang")

    def run(name: str) -> list[Any]:
        jobs = [
            {
                "model": str(model),
                "prompts": PROMPTS,
                "max_tokens": ANSWER_TOKENS,
                "args": arguments,
                "env": environment,
            }
            for _, arguments, environment in JOBS[name]
        ]
        answer = root / f"{name}.json"
        with (root / f"{name}.log").open("w") as log:
            done = subprocess.run(
                [sys.executable, str(WORKER), str(answer)],
                input=json.dumps(jobs),
                text=True,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=600,
                env={**os.environ, **SGLANG.environment(), "HF_HUB_OFFLINE": "1"},
                check=False,
            )
        assert done.returncode == 0, f"exit status {done.returncode}: {Path(log.name).read_text()[-4000:]}"
        passes: list[Any] = json.loads(answer.read_text())
        return passes

    with ThreadPoolExecutor(len(JOBS)) as pool:
        ran = [passes for part in pool.map(run, JOBS) for passes in part]
    logs = {name: (root / f"{name}.log").read_text() for name in JOBS}
    return {"passes": dict(zip(NAMES, ran, strict=True)), "logs": logs}


@pytest.fixture(scope="module")
def server(model: Path, answers: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server; after the engines of `answers`, because two cores serve only those well."""
    with Server(SGLANG, model, tmp_path_factory.mktemp("server") / "serve.log", arguments=SERVER_ARGUMENTS) as running:
        yield running


def generate(server: Server, prompt: str) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}
    answer = json.loads(server.request("POST", "/generate", {"text": prompt, "sampling_params": sampling}))
    tokens: list[int] = answer["output_ids"]
    return tokens


def assert_like_stock(answers: dict[str, Any], tokens: list[list[int]]) -> None:
    stock = [answer["tokens"] for answer in answers["passes"]["stock"][0]]
    different = [
        f"{prompt[-60:]!r}: {ours} instead of {theirs}"
        for prompt, ours, theirs in zip(PROMPTS, tokens, stock, strict=True)
        if ours != theirs
    ]
    assert not different, "\n".join(different)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_stock(answers: dict[str, Any], name: str) -> None:
    for one_pass in answers["passes"][name]:
        assert_like_stock(answers, [answer["tokens"] for answer in one_pass])


def test_answers_depend_on_what_is_tested(answers: dict[str, Any]) -> None:
    tokens = [tuple(answer["tokens"]) for answer in answers["passes"]["stock"][0]]
    assert len(PROMPTS) >= 20
    assert len(set(tokens)) > len(PROMPTS) / 2
    for name in NAMES:  # the second time most of every prompt is in the prefix cache
        cached = [answer["cached"] for answer in answers["passes"][name][1]]
        assert min(cached[len(SHORT) :]) > 96
    assert [log.count(LINE) for log in answers["logs"].values()] == [1, 3]


def test_server_uses_this_backend(server: Server) -> None:
    server.confirm_backend()
    assert server.log.read_text().count(LINE) == 1
    assert "Paris" in server.chat("What is the capital of France?", ANSWER_TOKENS).text


def test_full_cache(server: Server, answers: dict[str, Any]) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert_like_stock(answers, list(pool.map(lambda prompt: generate(server, prompt), PROMPTS)))
    assert re.search(r"#queue-req: [1-9]", server.log.read_text())
    with pytest.raises(DemoError, match=r"status 400: .*exceeds the maximum allowed length"):
        generate(server, LONG[-1] * 2)


def test_killed_scheduler(server: Server) -> None:
    """The last test of this server: it ends, and says why."""
    import psutil

    (scheduler,) = (child for child in psutil.Process(server.pid).children(recursive=True) if "schedul" in child.name())
    scheduler.send_signal(signal.SIGKILL)
    with pytest.raises(DemoError, match="the server ended"):
        server.wait()
    assert "scheduler" in server.log.read_text()


@pytest.fixture(scope="module")
def last_starts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Start what answers nothing else at the same time: a model that cannot be served, and the example."""
    root = tmp_path_factory.mktemp("last")
    large = root / "large"
    large.mkdir()
    (large / "config.json").write_text(json.dumps(LARGE_HEADS))
    example = Path(__file__).parents[2] / "examples" / "serve_sglang.py"

    def refused() -> str:
        arguments = ("--load-format", "dummy", "--skip-tokenizer-init")
        with pytest.raises(DemoError) as failed, Server(SGLANG, large, root / "serve.log", arguments=arguments):
            pass
        return str(failed.value)

    def ran() -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **SGLANG.environment()}
        command = [sys.executable, str(example), str(model)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)

    with ThreadPoolExecutor(2) as pool:
        both = {"refused": pool.submit(refused), "example": pool.submit(ran)}
        return {name: future.result() for name, future in both.items()}


def test_unsupported_model_is_refused(last_starts: dict[str, Any]) -> None:
    words = f"attention backend {OURS} was chosen, but cannot serve this: head size 512: expected 1 to 256"
    assert words in last_starts["refused"]


def test_offline_example(last_starts: dict[str, Any]) -> None:
    result = last_starts["example"]
    assert result.returncode == 0, result.stderr[-2000:]
    assert "Paris" in result.stdout
    assert LINE in result.stdout + result.stderr


def test_server_without_the_plugin_does_not_start(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "none")
    with pytest.raises(DemoError, match=OURS), Server(SGLANG, model, tmp_path / "serve.log"):
        pass
