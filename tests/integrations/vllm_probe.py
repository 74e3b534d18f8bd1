"""Questions to the plug-in that need vLLM but no engine, each answered in a process of its own.

A script: the name of a question as its argument; the answer is the last line of standard output, as JSON.
"""

from __future__ import annotations

import json
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import torch

ASKED: dict[str, Any] = {
    "head_size": 64,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": None,
    "attn_type": "decoder",
}


def registered() -> dict[str, Any]:
    """Register as vLLM does, and twice more."""
    import flashinfer_core_vllm
    from vllm.config.attention import AttentionConfig
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    before = list(AttentionBackendEnum.__members__)
    load_general_plugins()
    hook = type(current_platform).get_attn_backend_cls.__func__
    flashinfer_core_vllm.register()
    flashinfer_core_vllm.register()
    config = AttentionSelectorConfig(**ASKED)
    return {
        "added": [name for name in AttentionBackendEnum.__members__ if name not in before],
        "one_hook": hook is type(current_platform).get_attn_backend_cls.__func__,
        "answers": {
            str(asked): current_platform.get_attn_backend_cls(AttentionConfig(backend=asked).backend, config)
            for asked in (None, "CPU_ATTN", "FLASHINFER", "TORCH_SDPA", "CUSTOM", "flashinfer_core")
        },
    }


def slot_taken() -> dict[str, Any]:
    import flashinfer_core_vllm
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "somebody.elses.Backend")
    flashinfer_core_vllm.register()
    return {name: AttentionBackendEnum[name].get_path() for name in ("CUSTOM", "FLASHINFER_CORE")}


def pickled() -> str:
    import flashinfer_core_vllm
    from vllm.config.attention import AttentionConfig

    flashinfer_core_vllm.register()
    return pickle.dumps(AttentionConfig(backend="FLASHINFER_CORE")).hex()


def unpickled(hexadecimal: str) -> str:
    backend = pickle.loads(bytes.fromhex(hexadecimal)).backend
    return f"{type(backend).__name__}.{backend.name}"


def reasons(cases: str) -> list[list[str]]:
    """Return what `validate_configuration` says of each case."""
    import flashinfer_core_vllm.backend as backend
    from vllm.platforms.interface import DeviceCapability

    answers = []
    for changes in json.loads(cases):
        asked = {**ASKED, **changes}
        if isinstance(asked["dtype"], str):
            asked["dtype"] = getattr(torch, asked["dtype"])
        backend.current_platform = SimpleNamespace(device_type=asked.pop("device", "cpu"))
        capability = DeviceCapability(*asked.pop("capability")) if "capability" in asked else None
        answers.append(backend.FlashInferCoreBackend.validate_configuration(device_capability=capability, **asked))
    return answers


def query_rows(batches: str) -> list[float]:
    """Return for how many rows a request a GPU's plans are made: of (mode of graphs, most rows, tokens, requests)."""
    from flashinfer_core_vllm.backend import FlashInferCoreMetadataBuilder
    from vllm.config import CUDAGraphMode

    found = []
    for mode, most, tokens, requests in json.loads(batches):
        compilation = SimpleNamespace(cudagraph_mode=CUDAGraphMode[mode])
        builder = SimpleNamespace(vllm_config=SimpleNamespace(compilation_config=compilation, num_speculative_tokens=3))
        batch = SimpleNamespace(max_query_len=most, num_actual_tokens=tokens, num_reqs=requests)
        found.append(FlashInferCoreMetadataBuilder._q_len(builder, batch))
    return found


def graphs() -> list[str]:
    """Return which batches full CUDA graphs are captured of, on the CPU and on a GPU."""
    import flashinfer_core_vllm.backend as backend

    found = []
    for cuda in (False, True):
        backend.current_platform = SimpleNamespace(is_cuda=lambda cuda=cuda: cuda)
        found.append(backend.FlashInferCoreMetadataBuilder.get_cudagraph_support(None, None).name)
    return found


def layers(*names: str) -> dict[str, Any]:
    """Run layers beside the formula: what no model of ours brings up."""
    return {name: _layer(name) for name in names}


def _layer(name: str) -> dict[str, Any]:
    from flashinfer_core_vllm.backend import FlashInferCoreImpl, FlashInferCoreMetadataBuilder
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    class OneLayer(AttentionLayerBase):  # type: ignore[misc]
        def __init__(self, impl: FlashInferCoreImpl) -> None:
            self.impl = impl

        def get_attn_backend(self) -> Any: ...

        def get_kv_cache_spec(self, vllm_config: Any) -> Any: ...

    heads, kv_heads, size, size_v, page = 4, 2, 24, 40 if name == "value_size" else 24, 16
    settings = {"sliding_window": 8} if name == "window_not_causal" else {}
    impl = FlashInferCoreImpl(heads, size, 0.3, kv_heads, **settings)
    spec = FullAttentionSpec(
        block_size=page, num_kv_heads=kv_heads, head_size=size, head_size_v=size_v, dtype=torch.float32
    )
    context = {"layer": OneLayer(impl)}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    builder = FlashInferCoreMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))

    torch.manual_seed(1)
    lengths, new = [37, 5], [6, 5]
    table = torch.tensor([[3, 1, 2], [5, 0, 0]], dtype=torch.int32)
    cache = torch.randn(6, kv_heads, page, size + size_v)
    causal = {"not_causal": False, "window_not_causal": False, "causal_tensor": torch.ones(2)}.get(name, True)
    batch = SimpleNamespace(
        num_reqs=2,
        query_start_loc_cpu=torch.tensor([0, 6, 11], dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table_tensor=table,
        slot_mapping=torch.tensor([r_page * page + s for r_page, s in zip([2] * 5 + [5] * 5, range(10), strict=True)]),
        causal=causal,
        mm_req_doc_ranges=None,
        rswa_prefix_lens=None,
    )
    q, out = torch.randn(13, heads, size), torch.full((13, heads, size_v), 7.0)
    try:
        metadata = builder.build(0, batch)
    except NotImplementedError as error:
        return {"refused": str(error)}
    impl.forward(None, q, None, None, cache, metadata, out)

    worst = 0.0
    for r, (length, count) in enumerate(zip(lengths, new, strict=True)):
        kv = cache[table[r].long()].transpose(1, 2).flatten(0, 1)[:length].repeat_interleave(heads // kv_heads, 1)
        rows = slice(*batch.query_start_loc_cpu[r : r + 2].tolist())
        logits = torch.einsum("qhd,khd->hqk", q[rows], kv[..., :size]) * 0.3
        if causal:
            logits += torch.full((count, length), float("-inf")).triu(length - count + 1)
        expected = torch.einsum("hqk,khd->qhd", logits.softmax(-1), kv[..., size:])
        worst = max(worst, float((out[rows] - expected).abs().max()))
    return {"worst": worst, "padding_untouched": bool((out[11:] == 7.0).all())}


if __name__ == "__main__":
    question, *arguments = sys.argv[1:]
    print(json.dumps(globals()[question](*arguments)))
