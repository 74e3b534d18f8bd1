"""What SGLang decides by the name of a backend: that it knows ours, and that others are as they were."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

import flashinfer_core_sglang
import torch
from flashinfer_core_sglang import NAME
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang_layers import World

GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "vocab_size": 64,
    "max_position_embeddings": 512,
    "num_local_experts": 4,
    "intermediate_size": 64,
}


@pytest.fixture(scope="module", autouse=True)
def others() -> dict[str, Any]:
    """Load the plug-in as SGLang does, and return the backends that there were before."""
    before = dict(ATTENTION_BACKENDS)
    load_plugins()
    return before


def test_registration_is_idempotent_and_leaves_other_backends_alone(others: dict[str, Any]) -> None:
    from sglang.srt import server_args

    flashinfer_core_sglang.register()
    flashinfer_core_sglang.register()
    assert {name: ATTENTION_BACKENDS[name] for name in others} == others
    assert set(ATTENTION_BACKENDS) - set(others) == {NAME}
    for which in ("", "DRAFT_", "DETERMINISTIC_"):
        names = getattr(server_args, f"{which}ATTENTION_BACKEND_CHOICES", None)
        if names is None:
            assert which == "DRAFT_"  # older releases have no such list
            continue
        assert Counter(names)[NAME] == 1
        assert "triton" in names
    assert Counter(server_args.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND)[NAME] == 1


@pytest.mark.parametrize("flag", ["--attention-backend", "--prefill-attention-backend", "--decode-attention-backend"])
def test_flags(flag: str) -> None:
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = parser.parse_args(["--model-path", "model", flag, NAME])
    assert getattr(given, flag.removeprefix("--").replace("-", "_")) == NAME


def test_all_hooks_are_applied() -> None:
    ours = {target for target, hooks in HookRegistry._hooks.items() if any("flashinfer" in str(h[2]) for h in hooks)}
    assert ours <= HookRegistry._patched
    assert any(target.endswith("DraftBackendFactory._create_backend") for target in ours)
    assert any(target.endswith("handle_model_specific_adjustments") for target in ours)


def test_models_with_lists_of_their_own(tmp_path: Path) -> None:
    from sglang.srt.server_args import prepare_server_args

    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    arguments = [
        "--model-path",
        str(tmp_path),
        "--skip-tokenizer-init",
        "--load-format",
        "dummy",
        "--dtype",
        "bfloat16",
    ]
    arguments += [] if torch.cuda.is_available() else ["--device", "cpu"]

    def resolve(backend: str) -> Any:
        resolved = prepare_server_args([*arguments, "--attention-backend", backend])
        getattr(resolved, "resolve_once", lambda: None)()  # older releases have done it by now
        return resolved

    with pytest.raises(AssertionError, match="GptOssForCausalLM requires one of"):
        resolve("torch_native")
    assert resolve(NAME).attention_backend == NAME


@pytest.mark.parametrize("decodes", [True, False])
def test_backends_of_a_draft_model(device: str, decodes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashinfer_core_sglang import backend
    from sglang.srt.speculative import draft_utils

    config = SimpleNamespace(is_encoder_decoder=False, attention_chunk_size=None, hf_config=None, hf_text_config=None)
    made: list[Any] = []

    class Ours(backend.FlashInferCoreAttnBackend):  # type: ignore[misc]
        def __init__(self, runner: Any, draft_step: int | None = None) -> None:
            runner.draft_attention_backend = NAME
            super().__init__(runner, draft_step)
            made.append((runner, draft_step))

    monkeypatch.setattr(backend, "FlashInferCoreAttnBackend", Ours)
    World(device, runner={"model_config": config})
    runner = made.pop()[0]
    monkeypatch.setattr(draft_utils, "attention_backends", lambda: (NAME, NAME), raising=False)
    monkeypatch.setattr(draft_utils, "_assert_draft_needs_no_conv_sidecar", lambda runner: None)
    monkeypatch.setattr(draft_utils, "get_spec", lambda: SimpleNamespace(speculative_attention_mode="prefill"))
    runner.server_args.speculative_draft_attention_backend = None
    for setting in ("attention_backend", "decode_attention_backend", "prefill_attention_backend"):
        setattr(runner.server_args, setting, NAME)
    wanted = signature(draft_utils.DraftBackendFactory).parameters
    given = {"server_args": runner.server_args, "draft_model_runner": runner, "topk": 1, "speculative_num_steps": 4}
    factory = draft_utils.DraftBackendFactory(**{name: given[name] for name in wanted if name in given})
    created = factory.create_decode_backend() if decodes else factory.create_draft_extend_backend()
    if decodes:
        assert [step for _, step in made] == [0, 1, 2]
        assert [type(child) for child in created.attn_backends] == [Ours] * 3
    else:
        assert type(created) is Ours
        assert made == [(runner, None)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU SGLang launches its Triton kernels")
class TestWithoutTriton:
    def test_support_is_answered_by_name(self) -> None:
        from sglang.srt.utils import common

        assert not common.support_triton(NAME)
        for other in ("triton", "torch_native"):
            assert common.support_triton(other) == common.support_triton.__wrapped__(other)

    @pytest.mark.parametrize("page_size", [2, 16])
    def test_slots_fill_pages(self, page_size: int) -> None:
        torch.manual_seed(page_size)
        pool = SimpleNamespace(register_layer_transfer_counter=None)
        allocator = PagedTokenToKVPoolAllocator(256 * page_size, page_size, torch.float32, "cpu", pool, False)
        lens = [5, 1, 33, 16]
        starts = torch.zeros(4, dtype=torch.int64)
        now = torch.tensor(lens)
        taken = allocator.alloc_extend(starts, starts, now, now, torch.full((4,), -1), int(now.sum()))
        rows = list(taken.split(lens))
        for _ in range(2 * page_size):  # decode steps
            last = torch.stack([row[-1] for row in rows])
            now = now + 1
            taken = allocator.alloc_decode(now, now, last)
            rows = [torch.cat([row, slot[None]]) for row, slot in zip(rows, taken, strict=True)]
        last = torch.stack([row[-1] for row in rows])
        before, now = now, now + torch.tensor([3, 40, 1, 17])
        taken = allocator.alloc_extend(before, before, now, now, last, int((now - before).sum()))
        rows = [torch.cat(pair) for pair in zip(rows, taken.split((now - before).tolist()), strict=True)]

        used = torch.cat(rows)
        assert len(used.unique()) == len(used)
        assert used.min() >= page_size  # page 0 is for padding
        for row in rows:
            pages = row[::page_size] // page_size
            expected = (pages.repeat_interleave(page_size) * page_size)[: len(row)] + torch.arange(len(row)) % page_size
            assert torch.equal(row, expected)

    def test_full_pool(self) -> None:
        pool = SimpleNamespace(register_layer_transfer_counter=None)
        allocator = PagedTokenToKVPoolAllocator(32, 16, torch.float32, "cpu", pool, False)
        zero, none = torch.zeros(1, dtype=torch.int64), torch.full((1,), -1)
        too_many, all_there_are = torch.tensor([33]), torch.tensor([32])
        assert allocator.alloc_extend(zero, zero, too_many, too_many, none, 33) is None
        slots = allocator.alloc_extend(zero, zero, all_there_are, all_there_are, none, 32)
        assert sorted(slots.tolist()) == list(range(16, 48))
        assert allocator.alloc_decode(too_many, too_many, slots[-1:]) is None


def test_kernels_that_cannot_be_loaded_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flashinfer_core_sglang.backend", raising=False)
    monkeypatch.delattr(flashinfer_core_sglang, "backend", raising=False)
    monkeypatch.setitem(sys.modules, "flashinfer_core_sglang.batches", None)
    with pytest.raises(ImportError, match=r"was chosen, but flashinfer_core cannot be loaded .* reinstall"):
        ATTENTION_BACKENDS[NAME](SimpleNamespace())
