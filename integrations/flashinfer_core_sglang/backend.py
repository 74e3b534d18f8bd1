"""SGLang's attention interface on the kernels of flashinfer_core. Serves SGLang from 0.5.17 on from one source.

To be read beside ``sglang/srt/layers/attention/base_attn_backend.py``. What is not peculiar to SGLang is in
`flashinfer_core.engine`.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention import base_attn_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from flashinfer_core import engine
from flashinfer_core.attention.plan import AttentionPlan
from flashinfer_core_sglang import NAME
from flashinfer_core_sglang.batches import Batch, Tables

logger = logging.getLogger(__name__)

# Speculation whose drafts are chains, so that causal attention is all that verifying them needs.
CHAINS = {None, "EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM"}
DEVICES = ("cpu",)  # those on which this backend has served SGLang; a GPU's tests are in place and have not been run
FP8 = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}


class Kind(NamedTuple):
    """What layers must have in common to share a plan: heads, where their keys are, and which of them are seen."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    window: int | None  # of layers whose keys are in the pool for windows
    cross: bool
    causal: bool


@cache
def announce(device_type: str) -> None:
    """Log, once in a process, that this backend serves."""
    logger.info("Using %s attention backend (%s).", NAME, engine.kernels_in_use(device_type))


class FlashInferCoreAttnBackend(AttentionBackend):
    """The backend that ``--attention-backend flashinfer_core`` names.

    Parameters
    ----------
    runner
        SGLang's model runner, with its model loaded and its pools made.
    draft_step
        Of the steps in which a draft model decodes, the one that this backend is for; None for the target model.

    Raises
    ------
    ValueError
        With everything that cannot be served.
    """

    # Plans are made from lengths where they are: on a GPU nothing is copied to the host, nor waited for.
    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, draft_step: int | None = None) -> None:
        super().__init__()
        self.device = torch.device(runner.device)
        self.pool = runner.token_to_kv_pool
        self._draft_step = draft_step
        layers = [module for module in runner.model.modules() if isinstance(module, RadixAttention)]
        reasons = refusals(runner, layers)
        if reasons:
            raise ValueError(f"attention backend {NAME} was chosen, but cannot serve this: {'; '.join(reasons)}")
        self._tables = Tables(runner.req_to_token_pool.req_to_token, self.pool, runner.page_size)
        self._cores = {layer: _core(layer) for layer in layers}
        self._kinds = {layer: self._kind(layer) for layer in layers}
        self._groups = self._group(layers, runner)
        self._plans: dict[Kind, AttentionPlan] = {}
        self._views: dict[RadixAttention, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._slots: tuple[torch.Tensor | None, Any] = (None, None)
        announce(self.device.type)

    def _kind(self, layer: RadixAttention) -> Kind:
        in_window_pool = isinstance(self.pool, BaseSWAKVPool) and self.pool.layers_mapping[layer.layer_id][1]
        core = self._cores[layer]
        if in_window_pool and core.window_left < 0:
            raise NotImplementedError(f"layer {layer.layer_id}: its keys are in the pool for windows, but it has none")
        return Kind(
            core.num_qo_heads,
            core.num_kv_heads,
            layer.qk_head_dim,
            layer.v_head_dim,
            core.window_left if in_window_pool else None,
            layer.is_cross_attention,
            not _bidirectional(layer),
        )

    def _group(self, layers: list[RadixAttention], runner: Any) -> dict[Kind, engine.LayerGroup]:
        members: dict[Kind, list[engine.Layer]] = {}
        for layer in layers:
            members.setdefault(self._kinds[layer], []).append(self._cores[layer])
        return {
            kind: engine.LayerGroup.of(
                cores,
                head_dim_qk=kind.head_dim_qk,
                head_dim_vo=kind.head_dim_vo,
                kv_dtype=runner.kv_cache_dtype,
                batch_invariant=runner.server_args.enable_deterministic_inference,
                max_requests=self._tables.max_requests,
            )
            for kind, cores in members.items()
        }

    # ---- once for each forward of the model ----

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan a batch that runs without a CUDA graph."""
        self._plan(forward_batch, captured=False)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plan a batch before it is captured, and again before each replay, which reads the arrays in their places."""
        self._plan(forward_batch, captured=True)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Record nothing: `init_forward_metadata_out_graph` does all."""
        self.on_after_cuda_graph_warmup()

    def on_after_cuda_graph_warmup(self) -> None:
        """Forget slots that were translated before the capture: a graph is to translate those of each replay."""
        self._slots = (None, None)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make the arrays that captured graphs read."""
        windows = {kind.window for kind in self._groups if kind.window is not None}
        encoder = any(kind.cross for kind in self._groups)
        self._tables.reserve(max_bs, q_len=-(-max_num_tokens // max_bs), windows=windows, encoder=encoder)
        for group in self._groups.values():
            group.max_requests = self._tables.max_requests

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of the requests that pad a batch to a captured size."""
        return 1

    def shared_read_ends(self, fm: Any) -> Any:
        """Say until when the scheduler must leave its tables alone: through a replay, if that reads them."""
        if fm.is_decode() or fm.is_target_verify():
            ends = base_attn_backend.SharedReadEnds
            return ends.POST_REPLAY if self._tables.reads_shared else ends.PRE_REPLAY
        return super().shared_read_ends(fm)

    def support_triton(self) -> bool:
        """Say whether SGLang may launch Triton kernels around attention."""
        return self.device.type != "cpu"

    def _plan(self, forward_batch: Any, captured: bool) -> None:
        self._plans = {}
        self._slots = (None, None)
        batch = Batch.of(forward_batch, draft_step=self._draft_step, captured=captured)
        if batch.size == 0:
            return
        arrays = self._tables.captured if captured else self._tables.eager
        for kind, group in self._groups.items():
            keys = self._tables.keys(arrays, batch, cross=kind.cross, window=kind.window)
            self._plans[kind] = group.plan_paged(
                keys.qo_indptr,
                keys.lens,
                keys.table,
                page_size=keys.page_size,
                causal=kind.causal,
                q_len=batch.q_len_hint,
                rows=keys.rows,
            )

    # ---- once for each layer ----

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Attend to the cache, this batch's keys included, which are written first."""
        return self._forward(q, k, v, layer, forward_batch, *args, **kwargs)

    forward_decode = forward_extend

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        for name, value in others.items():
            if value is not None and value is not False:
                raise NotImplementedError(
                    f"{name}: {NAME} does not serve what this asks of a layer; choose another attention backend for "
                    "this model"
                )
        if save_kv_cache and k is not None:
            self.pool.set_kv_buffer(layer, self._slots_of(layer, forward_batch), k, v, layer.k_scale, layer.v_scale)
        keys, values = self._cache_of(layer)
        core = self._cores[layer]
        if sinks is not core.sinks:  # SGLang has them here, and not where it builds the layer
            core.sinks = sinks
            core.place(self.device)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        quantized = keys.dtype in FP8
        core.run(
            self._plans[self._kinds[layer]],
            query,
            keys,
            values,
            out,
            k_scale=layer.k_scale_float if quantized else None,
            v_scale=layer.v_scale_float if quantized else None,
        )
        return out.view(out.shape[0], -1)

    def _slots_of(self, layer: RadixAttention, forward_batch: Any) -> Any:
        if layer.is_cross_attention:
            return KVWriteLoc(forward_batch.encoder_out_cache_loc, None)
        # The layers of a forward come with one tensor, and a draft model's steps each with their own.
        slots = forward_batch.out_cache_loc
        if slots is not self._slots[0]:
            swa = self.pool.translate_loc_from_full_to_swa(slots) if isinstance(self.pool, BaseSWAKVPool) else None
            self._slots = slots, KVWriteLoc(slots, swa)
        return self._slots[1]

    def _cache_of(self, layer: RadixAttention) -> tuple[torch.Tensor, torch.Tensor]:
        # Asked for each time, because the pool then waits for transfers; viewed as pages once.
        keys, values = self.pool.get_kv_buffer(layer.layer_id)
        held = self._views.get(layer)
        if held is None or held[0] is not keys:
            held = self._views[layer] = keys, self._tables.pages(keys), self._tables.pages(values)
        return held[1], held[2]


class FlashInferCoreMultiStepDraftBackend:
    """Plans all steps in which a draft model decodes, before the first of them."""

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, num_steps: int) -> None:
        # The last step's tokens are not attended to.
        self.attn_backends = [FlashInferCoreAttnBackend(runner, step) for step in range(num_steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan every step without a CUDA graph."""
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plan every step before a capture, and before each replay."""
        for backend in self.attn_backends:
            backend.init_forward_metadata_out_graph(forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Record nothing: `init_forward_metadata_out_graph` does all."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make the arrays that captured graphs read."""
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)


def refusals(runner: Any, layers: list[RadixAttention]) -> list[str]:
    """Say why a model, or a setting of the server, cannot be served."""
    args, pool, device = runner.server_args, runner.token_to_kv_pool, torch.device(runner.device)
    if device.type not in DEVICES:
        return [f"device type {device.type!r}: this version serves SGLang on {' and '.join(DEVICES)} only"]
    features = []
    if runner.use_mla_backend:
        features.append("mla")
    if getattr(args, "dcp_size", 1) > 1:
        features.append("dcp")
    if getattr(args, "attn_cp_size", 1) > 1:
        features.append("pcp")
    if args.enable_deterministic_inference:
        features.append("batch_invariant")
    if any(layer.attn_type == AttentionType.DECODER_BIDIRECTIONAL for layer in layers):
        features.append("mm_prefix")
    reasons = []
    if getattr(runner.model_config, "attention_chunk_size", None) is not None:
        reasons.append("chunked local attention is not served")
    if any(layer.logit_cap and layer.logit_capping_method != "tanh" for layer in layers):
        reasons.append("a soft cap other than tanh is not served")
    if any(layer.xai_temperature_len > 0 for layer in layers):
        reasons.append("logits that are scaled by the position (xai_temperature_len) are not served")
    if args.speculative_algorithm not in CHAINS:
        reasons.append(f"speculative algorithm {args.speculative_algorithm} is not served")
    if args.speculative_algorithm is not None and (args.speculative_eagle_topk or 1) > 1:
        reasons.append("trees of draft tokens are not served; set --speculative-eagle-topk 1")
    if runner.model_config.is_encoder_decoder and runner.page_size > 1:
        reasons.append("encoder-decoder models are served with --page-size 1 only")
    if getattr(getattr(runner, "kv_index_translator", None), "is_translating", False):
        reasons.append("the unified memory pool is not served")
    for part in _parts(pool):
        layout = getattr(part, "kv_cache_layout", "nhd")
        if layout not in ("nhd", "hnd"):
            reasons.append(f"KV-cache layout {layout}: expected nhd or hnd")
    capability = torch.cuda.get_device_capability() if device.type == "cuda" else None
    for head_dim in sorted({max(layer.qk_head_dim, layer.v_head_dim) for layer in layers}):
        for reason in engine.refusals(
            device_type=device.type,
            head_dim=head_dim,
            dtype=runner.dtype,
            kv_cache_dtype=FP8.get(runner.kv_cache_dtype) or str(runner.kv_cache_dtype).removeprefix("torch."),
            features=features,
            compute_capability=None if capability is None else 10 * capability[0] + capability[1],
        ):
            if reason not in reasons:
                reasons.append(reason)
    return reasons


def _parts(pool: Any) -> list[Any]:
    """Return the pools that a pool for layers of several kinds is made of, or the pool."""
    parts = [getattr(pool, name) for name in ("full_kv_pool", "swa_kv_pool") if hasattr(pool, name)]
    return parts or [pool]


def _bidirectional(layer: RadixAttention) -> bool:
    return bool(layer.is_cross_attention or layer.attn_type == AttentionType.ENCODER_ONLY)


def _core(layer: RadixAttention) -> engine.Layer:
    return engine.Layer(
        num_qo_heads=layer.tp_q_head_num,
        num_kv_heads=layer.tp_k_head_num,
        sm_scale=layer.scaling,
        logits_soft_cap=layer.logit_cap,
        window_left=layer.sliding_window_size,
        bidirectional=_bidirectional(layer),
    )
