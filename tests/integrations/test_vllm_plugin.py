"""How vLLM finds the plug-in, what is refused and in which words, and that nothing else is served in its place."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

import tiny_models
import vllm_engines
from vllm_engines import job

PROBE = Path(__file__).with_name("vllm_probe.py")
LINE = re.compile(
    r"Using FLASHINFER_CORE attention backend \(flashinfer_core \S+, \w+ kernels\)(, chosen as CUSTOM)?\."
)


def probe(question: str, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, str(PROBE), question, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_registration_is_idempotent_and_leaves_other_backends_alone() -> None:
    found = probe("registered")
    assert found["added"] == ["FLASHINFER_CORE"]
    assert found["one_hook"]
    stock = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    assert found["answers"] == {
        "None": stock,
        "CPU_ATTN": stock,
        "FLASHINFER": stock,
        "TORCH_SDPA": stock,
        "CUSTOM": "flashinfer_core_vllm.backend.CustomSlotBackend",
        "flashinfer_core": "flashinfer_core_vllm.backend.FlashInferCoreBackend",
    }


def test_slot_of_another_plug_in_is_left_to_it() -> None:
    assert probe("slot_taken") == {
        "CUSTOM": "somebody.elses.Backend",
        "FLASHINFER_CORE": "flashinfer_core_vllm.backend.FlashInferCoreBackend",
    }


def test_configuration_reaches_processes_without_plug_ins() -> None:
    # vLLM's own processes unpickle the configuration before they load plug-ins.
    assert probe("unpickled", probe("pickled")) == "AttentionBackendEnum.FLASHINFER_CORE"


SERVED: list[dict[str, Any]] = [
    {},
    *({"head_size": size} for size in (1, 40, 128, 256)),
    *({"dtype": dtype} for dtype in ("float32", "float16")),
    *({"kv_cache_dtype": dtype} for dtype in (None, "float16", "bfloat16")),
    *({"block_size": size} for size in (16, 24, 128)),
    *({"attn_type": kind} for kind in ("encoder_only", "encoder_decoder")),
    *({flag: True} for flag in ("has_sink", "has_sliding_window", "use_non_causal", "use_kv_connector")),
    *(
        {"device": "cuda", "capability": capability, "dtype": "float16", "kv_cache_dtype": dtype}
        for capability, dtype in (((7, 5), "auto"), ((9, 0), "float16"), ((9, 0), "fp8_e5m2"))
    ),
    {"device": "cuda", "capability": (9, 0), "kv_cache_dtype": "fp8", "has_sink": True, "use_batch_invariant": True},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"head_size": 512}, "head size 512: expected 1 to 256"),
    ({"dtype": "float64"}, "dtype torch.float64: expected float32, float16 or bfloat16"),
    ({"kv_cache_dtype": "fp8_e4m3"}, "KV-cache dtype 'fp8_e4m3': expected one of auto"),
    ({"kv_cache_dtype": "nvfp4"}, "KV-cache dtype 'nvfp4'"),
    ({"device": "xpu"}, "device type 'xpu': expected cpu or cuda"),
    ({"device": "cuda", "capability": (7, 0), "dtype": "float16"}, "compute capability 7.0: expected 7.5 or later"),
    ({"device": "cuda", "capability": (7, 5)}, "dtype torch.bfloat16: expected float16"),
    ({"device": "cuda", "dtype": "float32"}, "dtype torch.float32: expected float16 or bfloat16"),
    ({"device": "cuda", "kv_cache_dtype": "float16"}, "KV-cache dtype 'float16': expected bfloat16, the model's, or"),
    ({"device": "cuda", "kv_cache_dtype": "fp8_per_token_head"}, "KV-cache dtype 'fp8_per_token_head': expected one"),
    ({"attn_type": "encoder"}, "encoder attention"),
    ({"use_mla": True}, "(MLA) is not served yet"),
    ({"use_sparse": True}, "sparse attention is not served"),
    ({"use_mm_prefix": True}, "bidirectional attention within the image tokens"),
    ({"use_per_head_quant_scales": True}, "scales per head"),
    ({"use_batch_invariant": True}, "batch-invariant results are promised on GPUs only"),
    ({"use_pcp": True}, "prefill context parallelism"),
    ({"use_dcp": True}, "decode context parallelism"),
    ({"use_rswa": True}, "R-SWA"),
    ({"use_adaptive_verification": True}, "differ between host and device"),
    ({"use_feature_of_tomorrow": True}, "feature_of_tomorrow: flashinfer_core does not know this feature"),
]


@pytest.fixture(scope="module")
def reasons() -> list[list[str]]:
    cases = [*SERVED, *(case for case, _ in REFUSED)]
    answers: list[list[str]] = probe("reasons", json.dumps(cases))
    return answers


@pytest.mark.parametrize("case", range(len(SERVED)), ids=map(str, SERVED))
def test_served_configurations(reasons: list[list[str]], case: int) -> None:
    assert reasons[case] == []


@pytest.mark.parametrize("case", range(len(REFUSED)), ids=[str(case) for case, _ in REFUSED])
def test_refused_configurations(reasons: list[list[str]], case: int) -> None:
    (reason,) = reasons[len(SERVED) + case]
    assert REFUSED[case][1] in reason


def test_graphs_of_a_gpu() -> None:
    assert probe("graphs") == ["NEVER", "ALWAYS"]


def test_kernels_are_chosen_by_what_a_capture_and_its_replays_share() -> None:
    """Whatever the lengths of a batch, its kernel is that of the captured batch of as many requests and tokens."""
    decode = [("FULL_AND_PIECEWISE", 4, 64, 16), ("FULL_AND_PIECEWISE", 1, 16, 16), ("FULL_DECODE_ONLY", 3, 40, 16)]
    full = [("FULL", 64, 64, 16), ("FULL", 4, 64, 16), ("FULL", 40, 64, 16)]
    other = [("FULL_AND_PIECEWISE", 33, 64, 16), ("NONE", 64, 64, 1)]
    assert probe("query_rows", json.dumps(decode + full + other)) == [4.0] * 6 + [4.0, 64.0]


def test_layers_that_no_model_here_has() -> None:
    found = probe("layers", "value_size", "not_causal", "window_not_causal", "causal_tensor")
    for name in ("value_size", "not_causal"):
        assert found[name]["worst"] < 1e-5
        assert found[name]["padding_untouched"]
    assert "attention that is not causal" in found["window_not_causal"]["refused"]
    assert "causal: expected True or False for the whole batch" in found["causal_tensor"]["refused"]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("plugin")
    for kind in ("llama_gqa", "gemma2_window_cap"):
        tiny_models.build(kind, root / kind)
    llama: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    large = tiny_models.write_config(root / "large", **llama, head_dim=512)
    latent = tiny_models.write_config(
        root / "latent",
        architectures=["DeepseekV2ForCausalLM"],
        model_type="deepseek_v2",
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        first_k_dense_replace=2,
        num_key_value_heads=4,
    )
    two_sided = tiny_models.write_config(
        root / "two_sided",
        architectures=["ModernBertModel"],
        model_type="modernbert",
        global_attn_every_n_layers=2,
        local_attention=16,
    )
    normal, ours = root / "llama_gqa", "FLASHINFER_CORE"
    dummy: dict[str, Any] = {"load_format": "dummy"}
    per_kind = {"backend": "CPU_ATTN", "backend_per_kind": {"sliding_window": ours}}
    jobs = {
        "ours": job(normal, ours),
        "ours again, in lower case": job(normal, "flashinfer_core"),
        "slot": job(normal, "CUSTOM"),
        "nothing asked": job(normal, None),
        "windows only": job(root / "gemma2_window_cap", None, attention_config=per_kind),
        "head size": job(large, ours, **dummy),
        "fp8 cache": job(normal, ours, kv_cache_dtype="fp8"),
        "fp8 cache in the slot": job(normal, "CUSTOM", kv_cache_dtype="fp8"),
        "MLA": job(latent, ours, **dummy),
        "window in an encoder": job(two_sided, ours, max_num_batched_tokens=512, **dummy),
        "image prefix": job(normal, ours, hf_overrides={"is_mm_prefix_lm": True}),
        "batch invariance": job(normal, ours, env={"VLLM_BATCH_INVARIANT": "1"}),
    }
    done = vllm_engines.run(list(jobs.values()), root)
    return {"answers": dict(zip(jobs, done["answers"], strict=True)), "log": done["log"]}


@pytest.mark.parametrize(
    ("name", "backends"),
    [
        ("ours", ["FLASHINFER_CORE"]),
        ("ours again, in lower case", ["FLASHINFER_CORE"]),
        ("slot", ["CUSTOM"]),
        ("nothing asked", ["CPU_ATTN"]),
        ("windows only", ["CPU_ATTN", "FLASHINFER_CORE"]),
    ],
)
def test_layers_have_the_backend_that_was_asked_for(engines: dict[str, Any], name: str, backends: list[str]) -> None:
    answer = engines["answers"][name]
    assert "error" not in answer, answer["error"]
    assert answer["backends"] == backends
    if name != "windows only":
        assert answer["passes"][0]["tokens"] == engines["answers"]["ours"]["passes"][0]["tokens"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("head size", "attention backend FLASHINFER_CORE was chosen, but cannot serve this: head size 512"),
        ("fp8 cache", "attention backend FLASHINFER_CORE was chosen, but cannot serve this: KV-cache dtype 'fp8"),
        ("fp8 cache in the slot", "attention backend CUSTOM was chosen, but cannot serve this: KV-cache dtype 'fp8"),
        ("MLA", "multi-head latent attention (MLA) is not served yet"),
        ("window in an encoder", "a sliding window or ALiBi in attention that is not causal"),
        ("image prefix", "bidirectional attention within the image tokens"),
        ("batch invariance", "batch-invariant results are promised on GPUs only"),
    ],
)
def test_engine_does_not_start(engines: dict[str, Any], name: str, words: str) -> None:
    assert words in engines["answers"][name].get("error", "the engine started")


def test_each_choice_is_logged_once_in_a_process(engines: dict[str, Any]) -> None:
    lines = [line for line in engines["log"] if "Using FLASHINFER_CORE" in line]
    assert all(LINE.search(line) for line in lines), lines
    assert [line.endswith("chosen as CUSTOM.") for line in lines] == [False, True]
    assert not [line for line in engines["log"] if "Cannot use" in line]


def test_kernels_that_cannot_be_loaded_are_an_error(tmp_path: Path) -> None:
    tiny_models.write_config(tmp_path / "model", architectures=["LlamaForCausalLM"], model_type="llama")
    jobs = [job(tmp_path / "model", backend, load_format="dummy") for backend in ("FLASHINFER_CORE", "CUSTOM", None)]
    done = vllm_engines.run(jobs, tmp_path, TEST_MISSING_MODULES="flashinfer_core._native")
    for answer in done["answers"][:2]:
        assert "was chosen, but flashinfer_core cannot be loaded" in answer.get("error", "the engine started")
    assert done["answers"][2]["backends"] == ["CPU_ATTN"]
