"""The definition of every operation in plain float32 torch: slow, readable, and what the kernels are tested against."""

from flashinfer_core.reference.activation import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from flashinfer_core.reference.attention import alibi_slopes, attention, merge_states
from flashinfer_core.reference.norm import (
    fused_add_rmsnorm,
    gemma_fused_add_rmsnorm,
    gemma_rmsnorm,
    layernorm,
    rmsnorm,
)
from flashinfer_core.reference.page import (
    append_paged_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
    stored,
    write_kv_slots,
)
from flashinfer_core.reference.quantization import packbits, segment_packbits
from flashinfer_core.reference.rope import (
    apply_rope,
    cos_sin_cache,
    llama31_rope_frequencies,
    positions_of,
    rope_frequencies,
    rotate,
)

__all__ = [
    "alibi_slopes",
    "append_paged_kv_cache",
    "apply_rope",
    "attention",
    "cos_sin_cache",
    "fused_add_rmsnorm",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "get_batch_indices_positions",
    "get_seq_lens",
    "layernorm",
    "llama31_rope_frequencies",
    "merge_states",
    "packbits",
    "positions_of",
    "rmsnorm",
    "rope_frequencies",
    "rotate",
    "segment_packbits",
    "silu_and_mul",
    "stored",
    "write_kv_slots",
]
