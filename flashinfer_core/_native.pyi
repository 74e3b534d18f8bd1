# The extension module, see core_kernels/host/bindings.cpp. Tensors are passed as addresses, strides and sizes.

_Rows = tuple[int, int, int]
_Indices = tuple[int, bool, int, int]
_RopeHeads = tuple[int, int, int, int, int, int, int]
_Rope = tuple[int, bool, int, int, int, _RopeHeads, _RopeHeads]
_Stream = tuple[int, int, bool, int, int, int, int, int, int, int, int, int]

def cpu_isa() -> str: ...
def max_threads() -> int: ...
def openmp_runtime() -> str: ...

# core_kernels/host/bind_ops.cpp
def norm(
    dtype: int, weight_dtype: int, layer_norm: bool, outer: int, inner: int, dim: int, input: _Rows, out: _Rows,
    residual: _Rows, weight: int, bias: int, weight_offset: float, eps: float, /,
) -> None: ...  # fmt: skip
def activation(dtype: int, kind: int, outer: int, inner: int, dim: int, input: _Rows, out: _Rows, /) -> None: ...
def rope_pos_ids(rope: _Rope, pos_ids: _Indices, frequencies: int, /) -> None: ...
def rope_indptr(rope: _Rope, indptr: _Indices, offsets: _Indices, frequencies: int, /) -> None: ...
def rope_cached(
    rope: _Rope, positions: _Indices, cos_sin_cache: int, cached_positions: int, cos_sin_stride: int, /
) -> None: ...
def write_kv_slots(
    num_heads: int, num_pages: int, page_size: int, keys: _Stream, values: _Stream, slot_mapping: _Indices, /
) -> None: ...
def append_paged_kv(
    num_heads: int, num_pages: int, page_size: int, keys: _Stream, values: _Stream, batch_indices: _Indices,
    positions: _Indices, kv_indices: _Indices, kv_indptr: _Indices, kv_last_page_len: _Indices, /,
) -> None: ...  # fmt: skip
def batch_indices_positions(
    append_indptr: _Indices, seq_lens: _Indices, nnz: int, batch_indices: int, batch_indices_stride: int,
    positions: int, positions_stride: int, /,
) -> None: ...  # fmt: skip
def seq_lens(kv_indptr: _Indices, kv_last_page_len: _Indices, page_size: int, out: int, /) -> None: ...

# core_kernels/host/bind_attention.cpp
MAX_HEAD_DIM: int

class TensorLayout:
    def __init__(
        self, dtype_q: int, dtype_kv: int, dtype_o: int, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...],
        o: tuple[int, ...], /,
    ) -> None: ...  # fmt: skip

class AttentionPlan:
    def __init__(
        self, num_requests: int, qo_indptr: int, page_size: int, table: int, table_size: int, row_stride: int,
        kv_indptr: int, kv_last_page_len: int, kv_lens: int, kv_start: int, num_qo_heads: int, num_kv_heads: int,
        head_dim_qk: int, head_dim_vo: int, causal: bool, window_left: int, fixed_split_size: int, split_kv: bool,
        names: tuple[str, str, str, str, str, str],
    ) -> None: ...  # fmt: skip
    def run(
        self, layout: TensorLayout, q: int, k: int, v: int, o: int, lse: int, lse_token: int, lse_head: int,
        causal: bool, window_left: int, sm_scale: float, logits_soft_cap: float, v_scale: float, alibi_slopes: int,
        sinks: int, custom_mask: int, mask_indptr: int, rope_cos_sin: int, /,
    ) -> None: ...  # fmt: skip
    num_queries: int
    num_items: int
    num_splits: int
    kv_extent: int
    kv_lens: list[int]

def merge_states(
    dtype: int, num_tokens: int, num_heads: int, head_dim: int, states: list[tuple[int, int, int, int, int, int]],
    v_out: int, v_out_token: int, v_out_head: int, s_out: int, s_out_token: int, s_out_head: int, mask: int, /,
) -> None: ...  # fmt: skip
