"""Layers that SGLang builds, in every mode and for every pool, against the formula."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_layers import DIM, HEADS, STEPS, Step, World, tolerance


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("mode", STEPS)
def test_modes(device: str, mode: str, page_size: int) -> None:
    World(device, page_size=page_size, windows=(-1, -1)).check(STEPS[mode])


@pytest.mark.parametrize("page_size", [1, 16])
def test_heads_first_pool(device: str, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    world = World(device, page_size=page_size)
    assert world.pool.get_kv_buffer(0)[0].dim() == 4
    for mode in ("decode", "extend after a prefix"):
        world.check(STEPS[mode])


@pytest.mark.parametrize("window_pool", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("mode", STEPS)
def test_windows(device: str, mode: str, page_size: int, window_pool: bool) -> None:
    World(device, page_size=page_size, windows=(-1, 10, -1, 10), window_pool=window_pool).check(STEPS[mode])


@pytest.mark.parametrize("changes", [{"layer": {"logit_cap": 2.0}}, {"v_head_dim": 48}, {}])
def test_caps_sizes_and_sinks(device: str, changes: dict[str, Any]) -> None:
    sinks = None if changes else torch.randn(HEADS, device=device)
    world = World(device, **changes)
    for mode in ("decode", "extend after a prefix"):
        world.check(STEPS[mode], sinks=sinks)


def test_sinks_are_those_of_the_call(device: str) -> None:
    world = World(device)
    for sinks in (torch.zeros(HEADS, device=device), None, torch.full((HEADS,), 3.0, device=device).bfloat16()):
        world.check(STEPS["decode"], sinks=sinks)


def test_encoder_only(device: str) -> None:
    World(device, layer={"attn_type": AttentionType.ENCODER_ONLY}).check(STEPS["extend"])


@pytest.mark.parametrize("cross", [False, True])
def test_encoder_and_decoder(device: str, cross: bool) -> None:
    world = World(device, layer={"is_cross_attention": cross})
    for step in (STEPS["decode"], STEPS["extend after a prefix"]):
        world.check(replace(step, encoder_lens=[20, 33, 7]))


def test_steps_of_a_draft(device: str) -> None:
    decode = Step(ForwardMode.DECODE, [37, 9, 120], [1, 1, 1], [34, 6, 117], spec={})
    World(device, draft_step=2, args={"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1}).check(decode)


def test_idle_worker(device: str) -> None:
    world = World(device, windows=(-1, 10), window_pool=True)
    world.check(Step(ForwardMode.DECODE, [5], [1], [5]), rows=[8])
    idle = Step(ForwardMode.IDLE, [], [], [])
    batch = world.batch([], idle)
    world.backend.init_forward_metadata(batch)
    assert world.backend.forward(*world.inputs(world.model[0], idle), world.model[0], batch).shape == (0, HEADS * DIM)


def test_results_do_not_depend_on_the_batch(device: str) -> None:
    if device == "cpu":
        pytest.skip("promised on GPUs only")
    world = World(device, args={"enable_deterministic_inference": True})
    step = STEPS["decode"]
    world.fill([4, 0, 7], step)
    q, _, _ = world.inputs(world.model[0], step)

    def run(which: list[int]) -> torch.Tensor:
        part = replace(step, **{n: [getattr(step, n)[i] for i in which] for n in ("kv_lens", "q_lens", "lens")})
        batch = world.batch([[4, 0, 7][i] for i in which], part)
        world.backend.init_forward_metadata(batch)
        return world.backend.forward_decode(q[which], None, None, world.model[0], batch)

    together = run([0, 1, 2])
    for i in range(3):
        assert torch.equal(run([i])[0], together[i])


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("mode", ["decode", "verify", "draft extend"])
def test_replayed_batches(device: str, mode: str, page_size: int) -> None:
    if device == "cpu":
        pytest.skip("CUDA graphs need a GPU")
    world = World(device, page_size=page_size, windows=(-1, 10), window_pool=True)
    step, rows = STEPS[mode], [4, 0, 7]
    tokens = sum(step.q_lens)
    world.backend.init_cuda_graph_state(4, 4 * step.q_lens[0])
    fill = world.backend.get_cuda_graph_seq_len_fill_value()
    # SGLang captures a batch of the shortest requests, whose arrays later ones are copied into.
    static = world.batch(rows, step)
    static.seq_lens.fill_(fill)
    inputs = [world.inputs(layer, step) for layer in world.model]

    def run() -> list[torch.Tensor]:
        world.backend.init_forward_metadata_in_graph(static)
        return [world.backend.forward(*given, layer, static) for layer, given in zip(world.model, inputs, strict=True)]

    world.backend.init_forward_metadata_out_graph(static, in_capture=True)
    run()
    world.backend.on_after_cuda_graph_warmup()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run()
    for more in (0, 3):
        now = replace(step, kv_lens=[n + more for n in step.kv_lens], lens=[n + more for n in step.lens])
        at = [(row + more) % 9 for row in rows]
        world.fill(at, now)
        batch = world.batch(at, now)
        for name in ("seq_lens", "req_pool_indices", "out_cache_loc", "extend_seq_lens"):
            getattr(static, name).copy_(getattr(batch, name))
        for given in inputs:
            given[0].normal_()
        world.backend.init_forward_metadata_out_graph(static)
        graph.replay()
        for layer, given, out in zip(world.model, inputs, outs, strict=True):
            error = (out.double() - world.expected(layer, given[0], at, now)).abs().max()
            assert error < tolerance(device), f"layer {layer.layer_id}, {tokens} tokens: {error}"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"runner": {"use_mla_backend": True}}, r"\(MLA\) is not served"),
    ({"args": {"dcp_size": 2}}, "decode context parallelism is not served"),
    ({"args": {"attn_cp_size": 2}}, "prefill context parallelism is not served"),
    ({"runner": {"kv_cache_dtype": torch.uint8}}, "KV-cache dtype 'uint8'"),
    ({"args": {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4}}, "set --speculative-eagle-topk 1"),
    ({"args": {"speculative_algorithm": "DFLASH"}}, "speculative algorithm DFLASH is not served"),
    ({"layer": {"attn_type": AttentionType.DECODER_BIDIRECTIONAL}}, "bidirectional attention within the image tokens"),
    ({"layer": {"logit_cap": 2.0, "logit_capping_method": "other"}}, "soft cap other than tanh"),
    ({"windows": (10,), "layer": {"attn_type": AttentionType.ENCODER_ONLY}}, "a sliding window or ALiBi"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_refused(device: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=words):
        World(device, **changes)


def test_refused_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashinfer_core_sglang import backend

    monkeypatch.setattr(backend, "DEVICES", ("cpu",))  # as they are outside of these tests
    runner = SimpleNamespace(device="cuda", server_args=None, token_to_kv_pool=None)
    assert backend.refusals(runner, []) == ["device type 'cuda': this version serves SGLang on cpu only"]


@pytest.mark.parametrize(
    ("step", "changes", "words"),
    [
        (Step(ForwardMode.DLLM_EXTEND, [5], [5], [5]), {}, "forward mode DLLM_EXTEND"),
        (STEPS["decode"], {"multi_item_delimiter_indices": torch.ones(1)}, "multi_item_delimiter_indices"),
        (replace(STEPS["verify"], spec={"draft_token_num": 4, "ragged_verify_layout": 1}), {}, "ragged_verify_layout"),
    ],
)
def test_refused_batches(device: str, step: Step, changes: dict[str, Any], words: str) -> None:
    world = World(device)
    batch = world.batch(list(range(len(step.lens))), step)
    batch.__dict__.update(changes)
    with pytest.raises(NotImplementedError, match=words):
        world.backend.init_forward_metadata(batch)


def test_refused_arguments_of_a_layer(device: str) -> None:
    world = World(device)
    batch = world.batch([4, 0, 7], STEPS["decode"])
    world.backend.init_forward_metadata(batch)
    q, k, v = world.inputs(world.model[0], STEPS["decode"])
    with pytest.raises(NotImplementedError, match="score_mod: flashinfer_core does not serve"):
        world.backend.forward_decode(q, k, v, world.model[0], batch, score_mod=lambda score: score)
    assert q.shape == (3, HEADS * DIM)
