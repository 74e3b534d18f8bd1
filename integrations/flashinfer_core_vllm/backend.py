"""vLLM's attention interface on the kernels of flashinfer_core. Serves vLLM 0.26 and 0.32 from one source.

To be read beside ``vllm/v1/attention/backend.py``. What is not peculiar to vLLM is in `flashinfer_core.engine`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
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
from vllm.v1.kv_cache_interface import AttentionSpec, EncoderOnlyAttentionSpec

from flashinfer_core import engine
from flashinfer_core._checks import FLOAT_DTYPES
from flashinfer_core.attention.plan import MAX_HEAD_DIM, AttentionPlan
from flashinfer_core.page import write_kv_slots
from flashinfer_core_vllm import NAME

logger = init_logger("vllm.flashinfer_core")  # outside the namespace "vllm" nothing is printed

ATTENTION_TYPES = {
    AttentionType.DECODER: None,
    AttentionType.ENCODER_ONLY: "encoder_only",
    AttentionType.ENCODER_DECODER: "cross_attention",
}


class FlashInferCoreBackend(AttentionBackend):
    """The backend that ``--attention-backend FLASHINFER_CORE`` names."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = list(FLOAT_DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(engine.KV_CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        """Return the member of vLLM's backend enumeration that stands for this class."""
        return NAME

    @staticmethod
    def get_impl_cls() -> type[FlashInferCoreImpl]:
        """Return the class of a layer's implementation."""
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
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Say that the plan is made from the host's query lengths."""
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
        kind = ATTENTION_TYPES.get(attn_type, f"{attn_type} attention")
        if kind is not None:
            features.append(kind)
        return engine.refusals(
            device_type=current_platform.device_type,
            head_dim=head_size,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            features=features,
        )

    @classmethod
    def announce(cls) -> None:
        """Log, once in a process, that this backend serves."""
        _announce(cls.get_name())


class CustomSlotBackend(FlashInferCoreBackend):
    """The same backend under the name of vLLM's slot for plug-ins."""

    @staticmethod
    def get_name() -> str:
        """Return the member of vLLM's backend enumeration that stands for this class."""
        return "CUSTOM"


@cache
def _announce(name: str) -> None:
    chosen = "" if name == NAME else f", chosen as {name}"
    logger.info("Using FLASHINFER_CORE attention backend (%s)%s.", engine.kernels_in_use(), chosen)


@dataclass
class FlashInferCoreMetadata:
    """What the layers of a KV-cache group share in one step."""

    plan: AttentionPlan
    slot_mapping: torch.Tensor  # vLLM's wrapper for cross attention puts its own here


class FlashInferCoreMetadataBuilder(AttentionMetadataBuilder):
    """Plans each batch once for all layers of a KV-cache group."""

    _cudagraph_support = AttentionCGSupport.NEVER

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, layer_names)
        self.group = engine.LayerGroup.of(
            [layer.impl.layer for layer in layers.values()],
            head_dim_qk=kv_cache_spec.head_size,
            head_dim_vo=kv_cache_spec.head_size_v,
        )
        self.has_cache = not isinstance(kv_cache_spec, EncoderOnlyAttentionSpec)

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
        qo_indptr = batch.query_start_loc_cpu[: batch.num_reqs + 1]
        if self.has_cache:
            plan = self.group.plan_paged(
                qo_indptr,
                batch.seq_lens[: batch.num_reqs],
                batch.block_table_tensor[: batch.num_reqs],
                page_size=self.kv_cache_spec.block_size,
                causal=batch.causal,
            )
        else:
            plan = self.group.plan_ragged(qo_indptr, causal=batch.causal)
        return FlashInferCoreMetadata(plan, batch.slot_mapping)


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
            k, v = kv_cache.transpose(1, 2).tensor_split((self.head_size,), -1)
            self._cache, self._views = kv_cache, (k, v)
        return self._views

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write this step's keys and values into the cache. vLLM calls it before `forward`."""
        if self.has_cache:
            write_kv_slots(key, value, *self._keys_and_values(kv_cache), slot_mapping)

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
        self.layer.run(attn_metadata.plan, query, k, v, output)
        return output
