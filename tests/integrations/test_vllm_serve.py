"""vLLM's HTTP server with this backend: the same greedy tokens as vLLM's own CPU backend, alone and under load."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prompts import PROMPTS, SHARED_PREFIX, SHORT

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from flashinfer_core.demo import DemoError
from flashinfer_core.demo.engines import VLLM
from flashinfer_core.demo.model import prepare_model
from flashinfer_core.demo.server import Answer, Server

BACKEND, STOCK_BACKEND = VLLM.backend, VLLM.own_backend()
CHUNK = 64  # tokens that vLLM computes in one step: longer prompts come in chunks, mixed with decodes of others
# float32, in which two right computations agree on every token: in bfloat16 equally likely tokens are common
SETTINGS = (
    *("--dtype", "float32", "--max-model-len", "2048"),
    *("--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "16"),
)
ANSWER_TOKENS = 24


def ask_together(server: Server, prompts: list[str]) -> list[Answer]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: server.chat(prompt, ANSWER_TOKENS), prompts))


@pytest.fixture(scope="module")
def model() -> Path:
    return prepare_model()


@pytest.fixture(scope="module")
def stock_answers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    log = tmp_path_factory.mktemp("stock") / "serve.log"
    with Server(VLLM, model, log, backend=STOCK_BACKEND, arguments=(*SETTINGS, "--block-size", "32")) as server:
        answers = ask_together(server, PROMPTS)
        assert server.served_backend() != BACKEND
    return answers


@pytest.fixture(scope="module")
def server(model: Path, stock_answers: list[Answer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run our server, with smaller pages; after the stock one, because two cores serve only one of them well."""
    log = tmp_path_factory.mktemp("ours") / "serve.log"
    with Server(VLLM, model, log, arguments=(*SETTINGS, "--block-size", "16")) as running:
        yield running


def test_this_backend_serves(server: Server) -> None:
    server.confirm_backend()
    assert server.log.read_text().count(f"Using {BACKEND} attention backend") == 1


def test_chat_answers_are_sensible(server: Server) -> None:
    assert "Paris" in server.chat("What is the capital of France?", ANSWER_TOKENS).text


def test_greedy_tokens_equal_stock(server: Server, stock_answers: list[Answer]) -> None:
    answers = ask_together(server, PROMPTS)
    different = [
        f"{prompt[-60:]!r}: {ours.tokens} instead of {stock.tokens}"
        for prompt, ours, stock in zip(PROMPTS, answers, stock_answers, strict=True)
        if ours.tokens != stock.tokens
    ]
    assert not different, "\n".join(different)
    assert min(answer.prompt_tokens for answer in answers[len(SHORT) :]) > 2 * CHUNK  # these were chunked


def test_cached_prefix_gives_the_same_tokens(server: Server, stock_answers: list[Answer]) -> None:
    hits = prefix_cache_hits(server)
    answers = [server.chat(prompt, ANSWER_TOKENS) for prompt in SHARED_PREFIX]
    assert prefix_cache_hits(server) > hits
    expected = stock_answers[len(SHORT) : len(SHORT) + len(SHARED_PREFIX)]
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]


def test_200_concurrent_requests_give_the_tokens_of_one_at_a_time(server: Server) -> None:
    prompts = [f"Tell me a fact about the number {number}." for number in range(25)]
    alone = [server.chat(prompt, ANSWER_TOKENS).tokens for prompt in prompts]
    together = [answer.tokens for answer in ask_together(server, prompts * 8)]
    assert together == alone * 8


def test_server_without_the_plugin_does_not_start(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "none")
    with pytest.raises(DemoError, match=BACKEND), Server(VLLM, model, tmp_path / "serve.log", arguments=SETTINGS):
        pass


def test_offline_example(model: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "serve_vllm.py"
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    result = subprocess.run(
        [sys.executable, str(example), str(model)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "Paris" in result.stdout
    assert f"Using {BACKEND} attention backend" in result.stdout + result.stderr


def prefix_cache_hits(server: Server) -> float:
    name = "vllm:prefix_cache_hits_total"
    values = [line.split()[-1] for line in server.request("GET", "/metrics").splitlines() if line.startswith(name)]
    return sum(map(float, values))
