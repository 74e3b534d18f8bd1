"""Attention of single requests and of planned batches."""

from flashinfer_core.attention.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
)
from flashinfer_core.attention.plan import AttentionPlan
from flashinfer_core.attention.prefill import BatchPrefillWithPagedKVCacheWrapper
from flashinfer_core.attention.ragged import BatchPrefillWithRaggedKVCacheWrapper
from flashinfer_core.attention.single import single_decode_with_kv_cache, single_prefill_with_kv_cache

__all__ = [
    "AttentionPlan",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
]
