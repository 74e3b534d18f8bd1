"""Models of every kind of attention, served by vLLM with our backend, against vLLM's own and against transformers."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny_models  # noqa: E402
import vllm_engines  # noqa: E402
from vllm_engines import PROMPTS, job  # noqa: E402

OURS = "FLASHINFER_CORE"
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
DECODERS = [kind for kind in tiny_models.CONFIGS if kind not in ("bert_encoder", "whisper_cross")]
STOCK = [kind for kind in DECODERS if kind != "llama_d40"]  # vLLM's CPU kernel has no head size 40
# vLLM's Gemma 3n differs from that of transformers, with any attention backend.
LIKE_TRANSFORMERS = [kind for kind in DECODERS if kind != "gemma3n_shared_kv"]
# Where vLLM wants a certain page size (chunks are whole pages), or answers by page size, with any backend (Gemma 3n).
PAGES = {"llama4_chunks": 16, "gemma3n_shared_kv": 32}
TRANSCRIBE: dict[str, Any] = {
    "task": "transcribe",
    "max_model_len": 64,
    "max_num_batched_tokens": 256,
    "skip_tokenizer_init": False,
    "limit_mm_per_prompt": {"audio": 1},
}
EMBED: dict[str, Any] = {"task": "embed", "max_num_batched_tokens": 512, "skip_tokenizer_init": False}
# Settings of the engine under which one model's answers must not change.
SETTINGS: dict[str, dict[str, Any]] = {
    **{
        f"layout_{layout}_block_{block}": {"block_size": block, "env": {"VLLM_KV_CACHE_LAYOUT": layout}}
        for layout, block in zip(LAYOUTS, (16, 32, 64, 128, 16, 48), strict=True)
    },
    "one_prefill": {"max_num_batched_tokens": 1024},
    "no_prefix_cache": {"enable_prefix_caching": False, "block_size": 16},
}
# Last of all: it loads numba, and vLLM cannot start another engine beside that.
GUESSES: dict[str, Any] = {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
}
OTHER_DTYPES: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "bfloat16_cache": {"kv_cache_dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("models")
    return {kind: (root / kind, tiny_models.build(kind, root / kind)) for kind in tiny_models.CONFIGS}


@pytest.fixture(scope="module")
def answers(models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[str, Any]]:
    jobs: dict[Any, dict[str, Any]] = {}
    for i, kind in enumerate(DECODERS):
        path = models[kind][0]
        jobs[kind, OURS] = job(path, OURS, block_size=PAGES.get(kind, (16, 32, 64, 128)[i % 4]))
        if kind in STOCK:
            jobs[kind, "CPU_ATTN"] = job(path, "CPU_ATTN", block_size=32)
    for name, changes in {**SETTINGS, **OTHER_DTYPES}.items():
        jobs["llama_gqa", name] = job(models["llama_gqa"][0], OURS, **changes)
    jobs["gemma2_window_cap", "one_group"] = job(
        models["gemma2_window_cap"][0], OURS, disable_hybrid_kv_cache_manager=True
    )
    for kind, arguments in (("bert_encoder", EMBED), ("whisper_cross", TRANSCRIBE)):
        for backend in (OURS, "CPU_ATTN"):
            jobs[kind, backend] = job(models[kind][0], backend, **arguments)
    jobs["llama_gqa", "guesses"] = job(models["llama_gqa"][0], OURS, block_size=16, **GUESSES)
    done = vllm_engines.run(list(jobs.values()), tmp_path_factory.mktemp("answers"))
    return dict(zip(jobs, done["answers"], strict=True))


def generated(answers: dict[Any, dict[str, Any]], kind: str, name: str) -> list[dict[str, Any]]:
    answer = answers[kind, name]
    assert "error" not in answer, answer["error"]
    assert answer["backends"] == ["CPU_ATTN" if name == "CPU_ATTN" else OURS]
    passes: list[dict[str, Any]] = answer["passes"]
    return passes


def assert_same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    for our_pass, their_pass in zip(ours, theirs, strict=True):
        assert our_pass["tokens"] == their_pass["tokens"]
        for mine, other in zip(our_pass["logprobs"], their_pass["logprobs"], strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(other), rtol=0, atol=1e-4)


def assert_agrees_with_transformers(model: Any, one_pass: dict[str, Any], atol: float) -> None:
    """Check the log-probability of each generated token, given those before it."""
    for prompt, tokens, logprobs in zip(PROMPTS, one_pass["tokens"], one_pass["logprobs"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = logits.float().log_softmax(-1)
        torch.testing.assert_close(
            torch.tensor(logprobs), expected.gather(1, torch.tensor(tokens)[:, None])[:, 0], rtol=0, atol=atol
        )
        assert (expected.max(1).values - torch.tensor(logprobs) < 2 * atol).all(), "not the greedy token"


@pytest.mark.parametrize("kind", STOCK)
def test_decoder_equals_stock_backend(answers: dict[Any, dict[str, Any]], kind: str) -> None:
    assert_same(generated(answers, kind, OURS), generated(answers, kind, "CPU_ATTN"))


@pytest.mark.parametrize("kind", LIKE_TRANSFORMERS)
def test_decoder_agrees_with_transformers(
    models: dict[str, Any], answers: dict[Any, dict[str, Any]], kind: str
) -> None:
    for one_pass in generated(answers, kind, OURS):
        assert_agrees_with_transformers(models[kind][1], one_pass, atol=1e-3)


@pytest.mark.parametrize("name", [*SETTINGS, "guesses"])
def test_settings_do_not_change_answers(answers: dict[Any, dict[str, Any]], name: str) -> None:
    assert_same(generated(answers, "llama_gqa", name), generated(answers, "llama_gqa", OURS))
    if name.startswith("layout"):
        assert answers["llama_gqa", name]["layout"] == name.split("_")[1]


def test_windows_and_full_layers_in_one_group(answers: dict[Any, dict[str, Any]]) -> None:
    assert_same(
        generated(answers, "gemma2_window_cap", "one_group"), generated(answers, "gemma2_window_cap", "CPU_ATTN")
    )


@pytest.mark.parametrize("name", OTHER_DTYPES)
def test_other_dtypes(models: dict[str, Any], answers: dict[Any, dict[str, Any]], name: str) -> None:
    for one_pass in generated(answers, "llama_gqa", name):
        assert_agrees_with_transformers(models["llama_gqa"][1], one_pass, atol=0.15)


def test_prefix_cache_is_used(answers: dict[Any, dict[str, Any]]) -> None:
    cold, warm = generated(answers, "llama_gqa", OURS)
    assert cold["cached"] == [0] * len(PROMPTS)
    assert warm["cached"] == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]


def test_encoder_only(models: dict[str, Any], answers: dict[Any, dict[str, Any]]) -> None:
    ours, stock = answers["bert_encoder", OURS], answers["bert_encoder", "CPU_ATTN"]
    assert "error" not in ours, ours["error"]
    assert ours["backends"] == [OURS]
    torch.testing.assert_close(torch.tensor(ours["vectors"]), torch.tensor(stock["vectors"]), rtol=0, atol=1e-5)
    model = models["bert_encoder"][1]
    for prompt, vector in zip(PROMPTS, ours["vectors"], strict=True):
        with torch.no_grad():
            first = model(torch.tensor([prompt])).last_hidden_state[0, 0]
        torch.testing.assert_close(torch.tensor(vector), first / first.norm(), rtol=0, atol=1e-5)


def test_cross_attention(answers: dict[Any, dict[str, Any]]) -> None:
    assert_same(generated(answers, "whisper_cross", OURS), generated(answers, "whisper_cross", "CPU_ATTN"))


def test_answers_depend_on_what_is_tested(answers: dict[Any, dict[str, Any]]) -> None:
    # Prompts longer than the windows, and tokens that differ: otherwise the comparisons above would show little.
    assert max(map(len, PROMPTS)) > 24
    for kind in DECODERS:
        tokens = generated(answers, kind, OURS)[0]["tokens"]
        assert len({tuple(sequence) for sequence in tokens}) > 1
