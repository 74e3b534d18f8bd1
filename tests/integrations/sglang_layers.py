"""SGLang's own layers, pools and batches around our backend, without an engine, and the formula to compare with."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

HEADS, KV_HEADS, DIM, CONTEXT, ROWS = 4, 2, 32, 192, 9


def tolerance(device: str) -> float:
    return 1e-5 if device == "cpu" else 4e-3


@dataclass
class Step:
    """One forward of a batch.

    `kv_lens` counts the keys that queries may see, `q_lens` the queries. `lens` is what SGLang calls the length.
    """

    mode: ForwardMode
    kv_lens: list[int]
    q_lens: list[int]
    lens: list[int]
    encoder_lens: list[int] | None = None
    spec: dict[str, Any] | None = None


STEPS = {
    "decode": Step(ForwardMode.DECODE, [37, 1, 120], [1, 1, 1], [37, 1, 120]),
    "extend": Step(ForwardMode.EXTEND, [37, 9, 120], [37, 9, 120], [37, 9, 120]),
    "extend after a prefix": Step(ForwardMode.EXTEND, [37, 70, 120], [5, 64, 1], [37, 70, 120]),
    "mixed": Step(ForwardMode.MIXED, [50, 7, 120], [1, 7, 40], [50, 7, 120]),
    "verify": Step(ForwardMode.TARGET_VERIFY, [37, 9, 120], [4, 4, 4], [33, 5, 116], spec={"draft_token_num": 4}),
    "draft extend": Step(ForwardMode.DRAFT_EXTEND_V2, [37, 9, 120], [3, 3, 3], [37, 9, 120], spec={}),
}


@dataclass
class World:
    """A model's attention layers, its pools, and our backend for it."""

    device: str
    page_size: int = 1
    windows: tuple[int, ...] = (-1,)  # of each layer
    window_pool: bool = False
    v_head_dim: int = DIM
    layer: dict[str, Any] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    runner: dict[str, Any] = field(default_factory=dict)
    draft_step: int | None = None

    def __post_init__(self) -> None:
        from flashinfer_core_sglang import backend

        backend.DEVICES = ("cpu", "cuda")  # the tests of a GPU come before SGLang is served on one
        torch.manual_seed(0)
        self.dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
        self.model = torch.nn.ModuleList(
            RadixAttention(
                HEADS, DIM, 0.3, KV_HEADS, i, v_head_dim=self.v_head_dim, sliding_window_size=window, **self.layer
            )
            for i, window in enumerate(self.windows)
        )
        self.size = ROWS * CONTEXT  # slots; those of page 0 are for padding
        common = {"page_size": self.page_size, "dtype": self.dtype, "head_num": KV_HEADS, "head_dim": DIM}
        common |= {"device": self.device, "enable_memory_saver": False}
        if self.window_pool:
            inside = [i for i, window in enumerate(self.windows) if window >= 0]
            outside = [i for i, window in enumerate(self.windows) if window < 0]
            self.pool = SWAKVPool(
                self.size, self.size, swa_attention_layer_ids=inside, full_attention_layer_ids=outside, **common
            )
            pages = 1 + torch.randperm(self.size // self.page_size)
            slots = pages[:, None] * self.page_size + torch.arange(self.page_size)
            mapping = torch.zeros(self.size + self.page_size, dtype=torch.int64)
            mapping[self.page_size :] = slots.flatten()
            self.pool.register_mapping(mapping.to(self.device))
        else:
            self.pool = MHATokenToKVPool(self.size, layer_num=len(self.windows), v_head_dim=self.v_head_dim, **common)
        self.rows = ReqToTokenPool(ROWS, CONTEXT, self.device, False)
        # Each row has pages of its own, in no order.
        pages = 1 + torch.randperm(self.size // self.page_size)[: ROWS * CONTEXT // self.page_size]
        slots = (pages[:, None] * self.page_size + torch.arange(self.page_size)).view(ROWS, CONTEXT)
        self.rows.req_to_token[:ROWS] = slots.to(self.device, torch.int32)
        args = {"enable_deterministic_inference": False, "speculative_algorithm": None}
        args |= {"speculative_eagle_topk": None}
        runner = {"model_config": SimpleNamespace(is_encoder_decoder=False, attention_chunk_size=None)}
        runner |= {"use_mla_backend": False, "dtype": self.dtype, "kv_cache_dtype": self.dtype}
        self.backend = backend.FlashInferCoreAttnBackend(
            SimpleNamespace(
                device=self.device,
                model=self.model,
                page_size=self.page_size,
                req_to_token_pool=self.rows,
                token_to_kv_pool=self.pool,
                server_args=SimpleNamespace(**{**args, **self.args}),
                **{**runner, **self.runner},
            ),
            self.draft_step,
        )

    def slots(self, layer: RadixAttention, row: int, begin: int, end: int) -> torch.Tensor:
        slots = self.rows.req_to_token[row, begin:end].long()
        in_window_pool = self.window_pool and self.pool.layers_mapping[layer.layer_id][1]
        return self.pool.translate_loc_from_full_to_swa(slots).long() if in_window_pool else slots

    def cache(self, layer: RadixAttention) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values by slots."""
        parts = self.pool.get_kv_buffer(layer.layer_id)
        heads_first = parts[0].dim() == 4
        k, v = (part.transpose(1, 2).flatten(0, 1) if heads_first else part for part in parts)
        return k, v

    def fill(self, rows: list[int], step: Step) -> None:
        """Write random keys and values where the batch has some, and NaN everywhere else."""
        for layer in self.model:
            for part in self.pool.get_kv_buffer(layer.layer_id):
                part.fill_(float("nan"))
            for i, row in enumerate(rows):
                encoder = 0 if step.encoder_lens is None else step.encoder_lens[i]
                # What precedes every window may be gone.
                gone = max(0, step.kv_lens[i] - step.q_lens[i] - layer.sliding_window_size) if self.window_pool else 0
                begin = gone if self.window_pool and layer.sliding_window_size >= 0 else 0
                slots = self.slots(layer, row, begin, encoder + step.kv_lens[i])
                heads_first = self.pool.get_kv_buffer(layer.layer_id)[0].dim() == 4
                for part in self.pool.get_kv_buffer(layer.layer_id):
                    values = torch.randn(len(slots), KV_HEADS, part.shape[-1], device=self.device).to(part.dtype)
                    if heads_first:
                        part[slots // self.page_size, :, slots % self.page_size] = values
                    else:
                        part[slots] = values

    def batch(self, rows: list[int], step: Step) -> SimpleNamespace:
        """Return SGLang's description of the batch, as far as a backend reads it."""
        to = {"dtype": torch.int64, "device": self.device}
        ends = [k + (0 if step.encoder_lens is None else step.encoder_lens[i]) for i, k in enumerate(step.kv_lens)]
        new = [self.rows.req_to_token[row, end - q : end] for row, end, q in zip(rows, ends, step.q_lens, strict=True)]
        encoder_slots = None
        if step.encoder_lens is not None:
            encoder_slots = [self.rows.req_to_token[row, :n] for row, n in zip(rows, step.encoder_lens, strict=True)]
        return SimpleNamespace(
            forward_mode=step.mode,
            batch_size=len(rows),
            input_ids=torch.zeros(sum(step.q_lens), **to),
            req_pool_indices=torch.tensor(rows, **to),
            seq_lens=torch.tensor(step.lens, **to),
            extend_seq_lens=torch.tensor(step.q_lens, dtype=torch.int32, device=self.device),
            out_cache_loc=torch.cat([*new, torch.zeros(0, **to)]),
            encoder_lens=None if step.encoder_lens is None else torch.tensor(step.encoder_lens, **to),
            encoder_out_cache_loc=None if encoder_slots is None else torch.cat(encoder_slots).long(),
            spec_info=None if step.spec is None else SimpleNamespace(**step.spec),
        )

    def inputs(self, layer: RadixAttention, step: Step) -> tuple[torch.Tensor, ...]:
        tokens = sum(step.q_lens)
        keys = tokens if not layer.is_cross_attention else sum(step.encoder_lens or [])
        make = {"device": self.device, "dtype": self.dtype}
        return (
            torch.randn(tokens, HEADS * DIM, **make),
            torch.randn(keys, KV_HEADS, DIM, **make),
            torch.randn(keys, KV_HEADS, layer.v_head_dim, **make),
        )

    def expected(
        self, layer: RadixAttention, q: torch.Tensor, rows: list[int], step: Step, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention as its formula, in float64."""
        out, start = [], 0
        k_cache, v_cache = self.cache(layer)
        for i, (row, kv_len, q_len) in enumerate(zip(rows, step.kv_lens, step.q_lens, strict=True)):
            encoder = 0 if step.encoder_lens is None else step.encoder_lens[i]
            begin, end = (0, encoder) if layer.is_cross_attention else (encoder, encoder + kv_len)
            slots = self.slots(layer, row, begin, end)
            k, v = (c[slots].repeat_interleave(HEADS // KV_HEADS, 1).double() for c in (k_cache, v_cache))
            queries = q[start : start + q_len].view(q_len, HEADS, DIM).double()
            logits = torch.einsum("qhd,khd->hqk", queries, k.nan_to_num()) * layer.scaling
            if layer.logit_cap:
                logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
            position = torch.arange(q_len, device=q.device)[:, None] + (end - begin - q_len)
            key = torch.arange(end - begin, device=q.device)[None]
            causal = not layer.is_cross_attention and layer.attn_type.value != "encoder_only"
            seen = key <= position if causal else torch.ones_like(key <= position)
            if layer.sliding_window_size >= 0:
                seen &= key >= position - layer.sliding_window_size
            logits = logits.masked_fill(~seen, float("-inf"))
            if sinks is not None:
                sink = sinks.double()[:, None, None].expand(-1, q_len, 1)
                logits = torch.cat([logits, sink], -1)
            weights = logits.softmax(-1)[..., : end - begin]
            out.append(torch.einsum("hqk,khd->qhd", weights, v.nan_to_num()).flatten(1))
            start += q_len
        return torch.cat(out)

    def check(self, step: Step, rows: list[int] | None = None, sinks: torch.Tensor | None = None) -> None:
        """Plan the batch, run every layer, and compare."""
        rows = [4, 0, 7] if rows is None else rows
        self.fill(rows, step)
        batch = self.batch(rows, step)
        self.backend.init_forward_metadata(batch)
        for layer in self.model:
            q, k, v = self.inputs(layer, step)
            given = {} if sinks is None else {"sinks": sinks}
            forward = self.backend.forward_decode if step.mode.is_decode() else self.backend.forward_extend
            out = forward(q, k, v, layer, batch, True, **given)
            error = (out.double() - self.expected(layer, q, rows, step, sinks)).abs().max()
            assert error < tolerance(self.device), f"layer {layer.layer_id}: {error}"
