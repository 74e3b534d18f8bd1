"""Random models served by vLLM on a GPU with our backend, in eager mode and in full CUDA graphs, against TRITON_ATTN.

Both round to 16 bits, in different orders. So a token may differ where the reference had two that were nearly as
likely, but for the first one of a prompt; what comes after it then differs too, and is not compared. In float16 a unit
in the last place of these models' logits is 0.008, in bfloat16 0.06.
"""

from __future__ import annotations

import importlib.util
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

import tiny_models
import vllm_engines
from vllm_engines import job

REFERENCE = "TRITON_ATTN"
# The difference of two tokens' log-probabilities that rounding may turn around.
TIE = 0.01
BF16_TIE = 0.13
KINDS = ("llama_d128", "llama_mqa", "llama_d256", "gemma2_window_cap", "gpt_oss_sinks", "bloom_alibi", "mistral_window")
# Longer than a chunk of prefill and shorter, some with a common beginning.
LENGTHS = (5, 300, 17, 33, 128, 129, 200, 1, 64, 400, 90, 250, 31, 8, 350, 77)
SHARED = [(j * 13 + j * j) % 250 + 1 for j in range(160)]
PROMPTS = [[(i * 37 + j * j + j * 5) % 250 + 1 for j in range(n)] for i, n in enumerate(LENGTHS)]
PROMPTS += [SHARED + prompt[:20] for prompt in PROMPTS]
REPEATED = [(prompt[:9] * 20)[:150] for prompt in PROMPTS if len(prompt) > 9]  # which guesses from the prompt get right

ARGUMENTS: dict[str, Any] = {
    "dtype": "float16",
    "max_model_len": 512,
    "max_num_seqs": 24,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 256 << 20,
    "gpu_memory_utilization": 0.05,
    "prompts": PROMPTS,
    "max_tokens": 24,
    "logprobs": 2,
}
SIZES = [1, 2, 4, 8, 16, 24, 32, 64, 128, 256]
# Every batch in a full graph, without torch.compile; then as vLLM has it by default.
FULL: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": SIZES},
}
COMPILED: dict[str, Any] = {"enforce_eager": False, "compilation_config": {"cudagraph_capture_sizes": SIZES}}
# Decode steps in full graphs, several query rows a request in speculation, and all else in eager mode.
DECODE_ONLY: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SIZES},
}
GUESSES: dict[str, Any] = {
    "speculative_config": {
        "method": "ngram" if importlib.util.find_spec("numba") else "ngram_gpu",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
    },
    "prompts": REPEATED,
}
FIRST_RUNNER = {"env": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}
INVARIANT: dict[str, Any] = {
    "env": {"VLLM_BATCH_INVARIANT": "1"},
    "enable_prefix_caching": False,
    "alone": True,
    "max_num_batched_tokens": 512,  # alone a prompt is one chunk, in a batch it may be two
}
CASCADE: dict[str, Any] = {
    **FIRST_RUNNER,
    "disable_cascade_attn": False,
    "prompts": [SHARED + prompt[:30] for prompt in PROMPTS],
    "constants": {"flashinfer_core_vllm.backend": {"LEAST_SHARED_KEYS": 1}},
    "counted": ("flashinfer_core.engine:LayerGroup.plan_cascade",),
}
LLAMA = "llama_d128"
BFLOAT16 = {"dtype": "bfloat16"}
FP8 = {"kv_cache_dtype": "fp8"}
BY_KIND = {"gemma2_window_cap": BFLOAT16}  # vLLM refuses it in float16
# Each list is run by one process, one engine after the other: at most one with graphs, since torch does not give their
# memory to another, and speculation last, since it may load numba.
SETTINGS: list[list[tuple[str, str, dict[str, Any]]]] = [
    *(
        [
            (kind, name, {**BY_KIND.get(kind, {}), **how})
            for name, how in (("reference", {}), ("eager", {}), ("full", FULL))
        ]
        for kind in KINDS
    ),
    [(LLAMA, "heads_first", {"env": {"VLLM_KV_CACHE_LAYOUT": "HND"}}), (LLAMA, "compiled", COMPILED)],
    [(LLAMA, "first_runner", {**FIRST_RUNNER, **FULL})],
    [(LLAMA, "bf16_reference", BFLOAT16), (LLAMA, "bf16", BFLOAT16), (LLAMA, "bf16_full", {**BFLOAT16, **FULL})],
    [(LLAMA, "fp8_reference", FP8), (LLAMA, "fp8", FP8), (LLAMA, "fp8_full", {**FP8, **FULL})],
    [(LLAMA, "cascade_reference", {"prompts": CASCADE["prompts"]}), (LLAMA, "cascade", CASCADE)],
    [(LLAMA, "invariant", INVARIANT), (LLAMA, "invariant_full", {**INVARIANT, **FULL})],
    [(LLAMA, "no_guesses", {"prompts": REPEATED}), (LLAMA, "guesses", {**GUESSES, **FULL})],
    [(LLAMA, "guesses_decode_only", {**GUESSES, **DECODE_ONLY})],
]


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[str, Any]]:
    if not request.config.getoption("--device").startswith("cuda"):
        pytest.skip("for a GPU")
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    ours = "FLASHINFER_CORE" if hasattr(AttentionBackendEnum, "register") else "CUSTOM"
    root = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        tiny_models.build(kind, root / kind)

    def run(part: int) -> dict[Any, dict[str, Any]]:
        settings = SETTINGS[part]
        jobs = [
            job(root / kind, REFERENCE if name.endswith("reference") else ours, **{**ARGUMENTS, **changes})
            for kind, name, changes in settings
        ]
        done = vllm_engines.run(jobs, tmp_path_factory.mktemp("answers"))
        return {(kind, name): answer for (kind, name, _), answer in zip(settings, done["answers"], strict=True)}

    found: dict[Any, dict[str, Any]] = {"ours": {"name": ours}}
    with ThreadPoolExecutor(min(len(SETTINGS), os.cpu_count() or 1)) as pool:
        for part in pool.map(run, range(len(SETTINGS))):
            found.update(part)
    return found


def passes(answers: dict[Any, dict[str, Any]], kind: str, name: str) -> list[dict[str, Any]]:
    answer = answers[kind, name]
    assert "error" not in answer, answer["error"]
    assert answer["backends"] == [REFERENCE if name.endswith("reference") else answers["ours"]["name"]]
    found: list[dict[str, Any]] = answer["passes"]
    return found


def assert_alike(ours: list[dict[str, Any]], reference: list[dict[str, Any]], tie: float = TIE) -> None:
    """Check the tokens of each prompt up to the first one that differs, where the reference must be undecided."""
    for our_pass, its_pass in zip(ours, reference, strict=True):
        for i, (mine, its) in enumerate(zip(our_pass["tokens"], its_pass["tokens"], strict=True)):
            at = next((t for t, (a, b) in enumerate(zip(mine, its, strict=True)) if a != b), None)
            assert at != 0, f"prompt {i}: the first token differs"
            assert at is None or its_pass["margins"][i][at] < tie, f"prompt {i}: token {at} of {mine} against {its}"


@pytest.mark.parametrize("name", ["eager", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_reference(answers: dict[Any, dict[str, Any]], kind: str, name: str) -> None:
    tie = BF16_TIE if "dtype" in BY_KIND.get(kind, {}) else TIE
    assert_alike(passes(answers, kind, name), passes(answers, kind, "reference"), tie)


@pytest.mark.parametrize("name", ["compiled", "first_runner", "heads_first"])
def test_settings(answers: dict[Any, dict[str, Any]], name: str) -> None:
    assert_alike(passes(answers, LLAMA, name), passes(answers, LLAMA, "reference"))


@pytest.mark.parametrize("name", ["bf16", "bf16_full"])
def test_bfloat16(answers: dict[Any, dict[str, Any]], name: str) -> None:
    assert_alike(passes(answers, LLAMA, name), passes(answers, LLAMA, "bf16_reference"), BF16_TIE)


def test_fp8_cache(answers: dict[Any, dict[str, Any]]) -> None:
    """The reference rounds its queries to FP8 too: so ours must be nearer to what a 16-bit cache gives."""
    eager = passes(answers, LLAMA, "fp8")
    assert_alike(passes(answers, LLAMA, "fp8_full"), eager)
    off = mean_difference(eager, passes(answers, LLAMA, "eager"))
    assert 0 < off < mean_difference(passes(answers, LLAMA, "fp8_reference"), passes(answers, LLAMA, "reference"))


def mean_difference(mine: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    """Return by how much the log-probabilities of the prompts' first tokens differ, where those are the same."""
    ours, theirs = (
        [(tokens[0], logprobs[0]) for tokens, logprobs in zip(one[0]["tokens"], one[0]["logprobs"], strict=True)]
        for one in (mine, others)
    )
    off = [abs(a - b) for (mine, a), (other, b) in zip(ours, theirs, strict=True) if mine == other]
    assert len(off) > len(ours) / 2
    return sum(off) / len(off)


@pytest.mark.parametrize("name", ["guesses", "guesses_decode_only"])
def test_guesses_from_the_prompt(answers: dict[Any, dict[str, Any]], name: str) -> None:
    assert_alike(passes(answers, LLAMA, name), passes(answers, LLAMA, "no_guesses"))


@pytest.mark.parametrize("name", ["invariant", "invariant_full"])
def test_batch_invariance(answers: dict[Any, dict[str, Any]], name: str) -> None:
    together, alone = passes(answers, LLAMA, name)
    assert together["tokens"] == alone["tokens"]
    assert together["logprobs"] == alone["logprobs"], "not the same bits"


def test_cascade(answers: dict[Any, dict[str, Any]]) -> None:
    assert_alike(passes(answers, LLAMA, "cascade"), passes(answers, LLAMA, "cascade_reference"))
    assert sum(answers[LLAMA, "cascade"]["calls"].values()) > 10


def test_tokens_depend_on_the_prompt(answers: dict[Any, dict[str, Any]]) -> None:
    for kind in KINDS:
        tokens = passes(answers, kind, "eager")[0]["tokens"]
        assert len({tuple(sequence) for sequence in tokens}) > len(tokens) // 2
