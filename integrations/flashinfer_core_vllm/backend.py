"""vLLM's attention interface on the kernels of flashinfer_core. Serves vLLM 0.26 and 0.32 from one source.

To be read beside ``vllm/v1/attention/backend.py``. What is not peculiar to vLLM is in `flashinfer_core.engine`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from vllm import envs
from vllm.config import CUDAGraphMode, VllmConfig, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends import utils
from vllm.v1.kv_cache_interface import AttentionSpec, EncoderOnlyAttentionSpec

from flashinfer_core import engine
from flashinfer_core._checks import FLOAT_DTYPES
from flashinfer_core.attention.plan import MAX_HEAD_DIM, AttentionPlan
from flashinfer_core.engine import CascadePlan
from flashinfer_core_vllm import NAME

logger = init_logger("vllm.flashinfer_core")  # outside the namespace "vllm" nothing is printed

ATTENTION_TYPES = {
    AttentionType.DECODER: None,
    AttentionType.ENCODER_ONLY: "encoder_only",
    AttentionType.ENCODER_DECODER: "cross_attention",
}
# Shared keys of a batch, prefix times requests, whose one reading is worth more than the CUDA graph that it gives up.
LEAST_SHARED_KEYS = 1 << 17


class FlashInferCoreBackend(AttentionBackend):
    """The backend that ``--attention-backend FLASHINFER_CORE`` names."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = list(FLOAT_DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(dict.fromkeys(sum(engine.KV_CACHE_DTYPES.values(), ())))

    @staticmethod
    def get_name() -> str:
        """Return the member of vLLM's backend enumeration that stands for this class."""
        return NAME

    @classmethod
    def get_impl_cls(cls) -> type[FlashInferCoreImpl]:
        """Return the class of a layer's implementation. vLLM asks when it makes a layer: so this backend serves."""
        _announce(cls.get_name())
        return FlashInferCoreImpl

    @staticmethod
    def get_builder_cls() -> type[FlashInferCoreMetadataBuilder]:
        """Return the class that plans a batch."""
        return FlashInferCoreMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Return the page sizes that the kernels read: any."""
        return [MultipleOf(1)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return the cache's shape. vLLM 0.26 asks for it; 0.32 decides alike by itself."""
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Return the order in memory of that shape's dimensions, which vLLM 0.26 lets its user choose."""
        pages = (0, 1, 2, 3) if utils.get_kv_cache_layout() == "HND" else (0, 2, 1, 3)
        # The kernels take any distance from page to page, so that the layers of a page may lie side by side.
        return (1, 0, *(i + 1 for i in pages[1:])) if include_num_layers_dimension else pages

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Say whether the kernels take heads of this size."""
        return 1 <= head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_sink(cls) -> bool:
        """Say that attention sinks are served."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Say that sliding windows are served."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Say that non-causal decoder attention is served."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Say whether a request's result can be made not to depend on its batch."""
        return bool(current_platform.is_cuda())

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Say that the query lengths on the host must be those on the device."""
        return False

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Say whether this kind of attention is served."""
        return attn_type in ATTENTION_TYPES

    @classmethod
    def validate_configuration(
        cls,
        *,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        attn_type: str,
        block_size: int | None = None,
        device_capability: Any = None,
        **flags: bool,
    ) -> list[str]:
        """Return why a configuration cannot be served; nothing if it can.

        The flags are vLLM's ``use_...`` and ``has_...``, whichever this release has.
        """
        features = [name.partition("_")[2] for name, asked in flags.items() if asked]
        capability = None if device_capability is None else device_capability.to_int()
        kind = ATTENTION_TYPES.get(attn_type, f"{attn_type} attention")
        if kind is not None:
            features.append(kind)
        return engine.refusals(
            device_type=current_platform.device_type,
            head_dim=head_size,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            features=features,
            compute_capability=capability,
        )


class CustomSlotBackend(FlashInferCoreBackend):
    """The same backend under the name of vLLM's slot for plug-ins."""

    @staticmethod
    def get_name() -> str:
        """Return the member of vLLM's backend enumeration that stands for this class."""
        return "CUSTOM"


@cache
def _announce(name: str) -> None:
    chosen = "" if name == NAME else f", chosen as {name}"
    logger.info(
        "Using FLASHINFER_CORE attention backend (%s)%s.", engine.kernels_in_use(current_platform.device_type), chosen
    )


@dataclass
class FlashInferCoreMetadata:
    """What the layers of a KV-cache group share in one step."""

    plan: AttentionPlan | CascadePlan
    slot_mapping: torch.Tensor  # vLLM's wrapper for cross attention puts its own here


class FlashInferCoreMetadataBuilder(AttentionMetadataBuilder):
    """Plans each batch once for all layers of a KV-cache group."""

    # On a GPU. The plan is made by a kernel from lengths and page tables on the GPU, in each step and outside of the
    # graph; the captured runs read what it wrote, in memory that is sized for the largest batch and never moves. Their
    # grids depend on the GPU alone. So a graph replays whatever batch vLLM pads to its numbers of requests and tokens,
    # prefill, decode or both. What would not be honest is a kernel chosen by the lengths of the captured batch: see
    # `_q_len`.
    _cudagraph_support = AttentionCGSupport.ALWAYS

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec) -> AttentionCGSupport:
        """Return which batches can be captured in full CUDA graphs: all on a GPU."""
        return cls._cudagraph_support if current_platform.is_cuda() else AttentionCGSupport.NEVER

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, layer_names)
        captured = self.get_cudagraph_support(vllm_config, kv_cache_spec) != AttentionCGSupport.NEVER
        self.group = engine.LayerGroup.of(
            [layer.impl.layer for layer in layers.values()],
            head_dim_qk=kv_cache_spec.head_size,
            head_dim_vo=kv_cache_spec.head_size_v,
            kv_dtype=kv_cache_spec.dtype,
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
            max_requests=vllm_config.scheduler_config.max_num_seqs if captured else 0,
        )
        self.has_cache = not isinstance(kv_cache_spec, EncoderOnlyAttentionSpec)
        self.on_gpu = self.supports_draft_decode_metadata_update = device.type != "cpu"

    def _q_len(self, batch: CommonAttentionMetadata) -> float:
        """Return about the query rows of a request, by which the plan's kernel is chosen.

        vLLM does not say whether a graph will replay the batch. If it might, only what is alike at the capture counts:
        the padded numbers of requests and tokens, or that no request has more rows than a decoding one.
        """
        compilation, decode = self.vllm_config.compilation_config, 1 + self.vllm_config.num_speculative_tokens
        if batch.max_query_len <= decode and compilation.cudagraph_mode != CUDAGraphMode.FULL:
            return float(decode)
        return float(batch.num_actual_tokens / max(1, batch.num_reqs))

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashInferCoreMetadata:
        """Plan a batch from vLLM's own tables."""
        batch = common_attn_metadata
        if isinstance(batch.causal, torch.Tensor):
            raise NotImplementedError(
                "causal: expected True or False for the whole batch, got one value a request; choose another attention "
                "backend for this model"
            )
        if batch.mm_req_doc_ranges or batch.rswa_prefix_lens is not None:
            raise NotImplementedError(
                "attention that depends on parts of the prompt (mm_req_doc_ranges, rswa_prefix_lens) is not served; "
                "choose another attention backend for this model"
            )
        n, q_len = batch.num_reqs, self._q_len(batch) if self.on_gpu else None
        qo_indptr = (batch.query_start_loc if self.on_gpu else batch.query_start_loc_cpu)[: n + 1]
        plan: AttentionPlan | CascadePlan
        if not self.has_cache:
            plan = self.group.plan_ragged(qo_indptr, causal=batch.causal, q_len=q_len)
        else:
            tables = qo_indptr, batch.seq_lens[:n], batch.block_table_tensor[:n]
            page_size = self.kv_cache_spec.block_size
            if common_prefix_len > 0:
                plan = self.group.plan_cascade(
                    *tables,
                    page_size=page_size,
                    num_rows=batch.num_actual_tokens,
                    prefix_len=common_prefix_len,
                    q_len=q_len,
                )
            else:
                plan = self.group.plan_paged(*tables, page_size=page_size, causal=batch.causal, q_len=q_len)
        return FlashInferCoreMetadata(plan, batch.slot_mapping)

    def update_draft_decode_metadata(self, metadata: FlashInferCoreMetadata) -> None:
        """Plan anew for lengths that have changed in place; vLLM records it in the graph of a draft model."""
        assert isinstance(metadata.plan, AttentionPlan)
        metadata.plan.refresh()

    def use_cascade_attention(
        self,
        common_prefix_len: int,
        query_lens: np.ndarray[Any, Any],
        num_query_heads: int,
        num_kv_heads: int,
        use_alibi: bool,
        use_sliding_window: bool,
        use_local_attention: bool,
        num_sms: int,
        dcp_world_size: int,
    ) -> bool:
        """Say whether to read the keys that all requests share once; vLLM 0.26 asks, for its first model runner."""
        if not self.on_gpu or use_alibi or use_sliding_window or use_local_attention or dcp_world_size > 1:
            return False
        return common_prefix_len * len(query_lens) >= LEAST_SHARED_KEYS


class FlashInferCoreImpl(AttentionImpl):
    """One attention layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,  # vLLM hands over that layer's cache, and writes once
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        if others:
            raise NotImplementedError(
                f"{', '.join(others)}: flashinfer_core does not know what this asks of a layer; choose another "
                "attention backend for this model"
            )
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_size = head_size
        self.scale = scale
        self.kv_cache_dtype = kv_cache_dtype
        self.cache_dtype = engine.cache_dtype(kv_cache_dtype)  # None: as vLLM allocates it
        self.has_cache = attn_type != AttentionType.ENCODER_ONLY
        self._cache: torch.Tensor | None = None
        self._views: tuple[torch.Tensor, torch.Tensor]
        self.layer = engine.Layer(
            num_qo_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            sm_scale=scale,
            logits_soft_cap=logits_soft_cap,
            window_left=-1 if sliding_window is None else sliding_window - 1,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            bidirectional=attn_type != AttentionType.DECODER,
        )

    def _keys_and_values(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # vLLM's view is [pages, heads, tokens, K then V], whatever the order in memory. The same tensor comes at every
        # step, so the two views are made once: making them costs as much as the rest of the host's work here.
        if kv_cache is not self._cache:
            cache = kv_cache if self.cache_dtype is None else kv_cache.view(self.cache_dtype)
            k, v = cache.transpose(1, 2).tensor_split((self.head_size,), -1)
            self._cache, self._views = kv_cache, (k, v)
        return self._views

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take over sinks that have just been loaded."""
        if self.layer.sinks is not None:
            self.layer.place(self.layer.sinks.device)

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write this step's keys and values into the cache. vLLM calls it before `forward`."""
        if not self.has_cache:
            return
        k, v = self._keys_and_values(kv_cache)
        if self.cache_dtype is None:
            self.layer.write(key, value, k, v, slot_mapping)
        else:
            self.layer.write(key, value, k, v, slot_mapping, k_scale=layer._k_scale, v_scale=layer._v_scale)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashInferCoreMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the attention of `query` into `output` ``[tokens, heads, size]``."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale: quantized outputs are not served; leave vLLM's fusion of them off")
        if attn_metadata is None:  # a run that only warms up, before there is a cache
            return output.fill_(0)
        k, v = self._keys_and_values(kv_cache) if self.has_cache else (key, value)
        if self.cache_dtype is None:
            self.layer.run(attn_metadata.plan, query, k, v, output)
        else:  # queries come as they are, so their scale has nothing to undo
            self.layer.run(attn_metadata.plan, query, k, v, output, k_scale=layer._k_scale, v_scale=layer._v_scale)
        return output
