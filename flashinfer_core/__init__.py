"""Kernels for LLM serving, call-compatible with FlashInfer's core. See README.md for what this version has."""

from importlib.metadata import PackageNotFoundError, version

import torch as _torch  # noqa: F401  loads the OpenMP runtime that the native kernels share

from flashinfer_core import bench, utils
from flashinfer_core.activation import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from flashinfer_core.attention import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
)
from flashinfer_core.attention.shared_prefix import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
)
from flashinfer_core.cascade import (
    MultiLevelCascadeAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from flashinfer_core.norm import (
    fused_add_rmsnorm,
    gemma_fused_add_rmsnorm,
    gemma_rmsnorm,
    layernorm,
    rmsnorm,
)
from flashinfer_core.page import append_paged_kv_cache, get_batch_indices_positions, get_seq_lens
from flashinfer_core.quantization import packbits, segment_packbits
from flashinfer_core.rope import (
    apply_llama31_rope,
    apply_llama31_rope_inplace,
    apply_llama31_rope_pos_ids,
    apply_llama31_rope_pos_ids_inplace,
    apply_rope,
    apply_rope_inplace,
    apply_rope_pos_ids,
    apply_rope_pos_ids_inplace,
    apply_rope_with_cos_sin_cache,
    apply_rope_with_cos_sin_cache_inplace,
)
from flashinfer_core.short_forms import (
    batch_decode_with_kv_cache,
    cudnn_batch_decode_with_kv_cache,
    merge_attention_states,
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
)

try:
    __version__ = version("flashinfer-core")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0"

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "append_paged_kv_cache",
    "apply_llama31_rope",
    "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace",
    "apply_rope",
    "apply_rope_inplace",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
    "batch_decode_with_kv_cache",
    "bench",
    "cudnn_batch_decode_with_kv_cache",
    "fused_add_rmsnorm",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "get_batch_indices_positions",
    "get_seq_lens",
    "layernorm",
    "merge_attention_states",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "packbits",
    "rmsnorm",
    "segment_packbits",
    "silu_and_mul",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "utils",
]
