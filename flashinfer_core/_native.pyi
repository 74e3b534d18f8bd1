# The extension module, see core_kernels/host/bindings.cpp. Tensors are passed as addresses, strides and sizes.

from collections.abc import Sequence

_Rows = tuple[int, int, int]
_Indices = tuple[int, bool, int, int]
_Rope = tuple[int, ...]
_Stream = tuple[int, int, bool, int, int, int, int, int, int, int, int, int, int]
_State = tuple[int, int, int, int, int, int]
# Kernel, whether it is the one for 16-byte accesses, stream, programmatic dependent launch; None for tensors on CPU.
_Call = tuple[CudaKernel, bool, int, bool] | None

def cpu_isa() -> str: ...
def max_threads() -> int: ...
def openmp_runtime() -> str: ...

# core_kernels/host/bind_ops.cpp
MAX_ROPE_FREQUENCIES: int

def norm(
    call: _Call, dtype: int, weight_dtype: int, layer_norm: bool, outer: int, inner: int, dim: int, input: _Rows,
    out: _Rows, residual: _Rows, weight: int, bias: int, weight_offset: float, eps: float, /,
) -> None: ...  # fmt: skip
def activation(
    call: _Call, dtype: int, kind: int, outer: int, inner: int, dim: int, input: _Rows, out: _Rows, /
) -> None: ...
def rope_pos_ids(call: _Call, rope: _Rope, pos_ids: _Indices, frequencies: int, /) -> None: ...
def rope_indptr(call: _Call, rope: _Rope, indptr: _Indices, offsets: _Indices, frequencies: int, /) -> None: ...
def rope_cached(
    call: _Call, rope: _Rope, positions: _Indices, cos_sin_cache: int, cached_positions: int, cos_sin_stride: int, /
) -> None: ...
def write_kv_slots(
    k_call: _Call, v_call: _Call, num_heads: int, num_pages: int, page_size: int, keys: _Stream, k_scale: float,
    values: _Stream, v_scale: float, slot_mapping: _Indices, /,
) -> None: ...  # fmt: skip
def append_paged_kv(
    k_call: _Call, v_call: _Call, num_heads: int, num_pages: int, page_size: int, keys: _Stream, values: _Stream,
    batch_indices: _Indices, positions: _Indices, kv_indices: _Indices, kv_indptr: _Indices,
    kv_last_page_len: _Indices, /,
) -> None: ...  # fmt: skip
def batch_indices_positions(
    call: _Call, append_indptr: _Indices, seq_lens: _Indices, nnz: int, batch_indices: int, batch_indices_stride: int,
    positions: int, positions_stride: int, /,
) -> None: ...  # fmt: skip
def seq_lens(call: _Call, kv_indptr: _Indices, kv_last_page_len: _Indices, page_size: int, out: int, /) -> None: ...
def merge_states(
    call: _Call, dtype: int, num_tokens: int, num_heads: int, head_dim: int, num_states: int, first: _State,
    second: _State, v_stride_state: int, s_stride_state: int, out: _State, mask: int, /,
) -> None: ...  # fmt: skip
def pack_bits(
    call: _Call, x: int, element_size: int, stride: int, size: int, little: bool, indptr: _Indices,
    out_indptr: _Indices, out: int, out_size: int, /,
) -> None: ...  # fmt: skip

# core_kernels/host/bind_attention.cpp
MAX_HEAD_DIM: int

_Batch = tuple[int, int, int, int, int, int, int, int, int, int, int, int]
_Names = tuple[str, str, str, str, str, str, str]
_Run = tuple[int, int, int, int, int, int, int, bool, int, float, float, float, int, int, int, int, int]

class TensorLayout:
    def __init__(
        self, dtype_q: int, dtype_kv: int, dtype_o: int, q_tokens: int, num_pages: int, q: tuple[int, ...],
        k: tuple[int, ...], v: tuple[int, ...], o: tuple[int, ...], /,
    ) -> None: ...  # fmt: skip

class AttentionPlan:
    def __init__(
        self, batch: _Batch, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, head_dim_vo: int, causal: bool,
        window_left: int, fixed_split_size: int, split_kv: bool, names: _Names,
    ) -> None: ...  # fmt: skip
    def run(self, layout: TensorLayout, run: _Run, /) -> None: ...
    num_queries: int
    num_splits: int
    kv_extent: int
    kv_lens: list[int]

# core_kernels/host/bind_cuda_attention.cpp
class HostBatch:
    def __init__(self, batch: _Batch, queries: bool, keys: bool, group: int, names: _Names, /) -> None: ...
    def num_slots(self, chunk: int, tile_rows: int, group: int, num_kv_heads: int) -> int: ...
    has_keys: bool
    num_queries: int | None
    kv_extent: int
    kv_lens: list[int] | None

class AttentionStatus:
    def take(self) -> tuple[int, int, int] | None: ...

class AttentionKernel:
    def __init__(
        self, kernel: CudaKernel, ctas: int, threads: int, smem: int, merge: CudaKernel | None = None,
        block_keys: int = 0, dim_qk: int = 0, dim_vo: int = 0,
    ) -> None: ...  # fmt: skip

class CudaAttentionPlan:
    def __init__(
        self, scheduler: CudaKernel, stream: int, batch: _Batch, num_kv_heads: int, group: int, causal: bool,
        window_left: int, tile_rows: int, min_chunk: int, num_ctas: int, fixed_chunk: int, num_slots: int,
        requests: int, schedule: int, status: AttentionStatus, page_table_size: int, partial_o: int, partial_lse: int,
        arrivals: int, /,
    ) -> None: ...  # fmt: skip
    def schedule(self, scheduler: CudaKernel, stream: int, /) -> None: ...
    def run(
        self, layout: TensorLayout, run: _Run, kernel: AttentionKernel, stream: int, scales: tuple[int, int, int],
        mask_bytes: int, rope_positions: int, /,
    ) -> bool: ...  # fmt: skip

def attention_smem_bytes(
    warps_m: int, warps_kv: int, rows_per_warp: int, block_keys: int, stages: int, dim_qk: int, dim_vo: int,
    kv_bytes: int, /,
) -> int: ...  # fmt: skip
def attention_sm90_smem_bytes(block_keys: int, stages: int, dim_qk: int, dim_vo: int, /) -> int: ...
def copy_to_device(copies: Sequence[tuple[int, int, int, int, int]], stream: int, device: int, /) -> None: ...
def is_capturing(stream: int, device: int) -> bool: ...

# core_kernels/host/bind_cuda.cpp
class CudaKernel:
    def __init__(self, cubin: bytes, name: str, device: int) -> None: ...
    def launch(
        self, grid: tuple[int, int, int], block: int, smem: int, stream: int, params: bytes, pdl: bool = False
    ) -> None: ...
    def occupancy(self, block: int, smem: int) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def registers(self) -> int: ...
    @property
    def local_bytes(self) -> int: ...
    @property
    def static_smem(self) -> int: ...

class CudaDevice:
    name: str
    compute_capability: int
    num_sms: int
    max_smem_per_block: int
    max_smem_per_sm: int
    l2_bytes: int

def cuda_device(index: int) -> CudaDevice: ...
def cuda_device_count() -> int: ...
def cuda_driver_version() -> int | None: ...
