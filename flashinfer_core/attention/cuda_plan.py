"""Plans on a GPU: the choice of a kernel, and the work list.

Arrays on the GPU are read there by the kernel that makes the work list; what is wrong in them is reported through
pinned memory, and raised by the next call. Arrays in host memory are checked and copied asynchronously.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from flashinfer_core import _native
from flashinfer_core._cuda import current_stream
from flashinfer_core.attention.arrays import ArgumentNames, BatchArrays
from flashinfer_core.attention.dispatch import Brought, Planned, lack_of_brought, lack_of_planned
from flashinfer_core.attention.kernels import Features, Variant, load_attention, load_schedule, smem_of
from flashinfer_core.attention.layout import Layout
from flashinfer_core.attention.memory import PlanMemory
from flashinfer_core.attention.options import NO_GPU_SCALES, GpuScales
from flashinfer_core.attention.tiles import SM90_TILES, Sm90Tile, Tile, choose_tile, ctas_per_sm, tile_name

_NEVER_CUT = 2**31 - 1
_SCHEDULE_BYTES, _REQUEST_BYTES = 32, 32  # of the structs of core_kernels/device/attention/params.h


@dataclass
class CudaBatch:
    """A planned batch on a GPU, and what the host knows of it."""

    native: _native.CudaAttentionPlan
    host: _native.HostBatch
    memory: PlanMemory
    held: tuple[torch.Tensor, ...]  # what `native` has the addresses of
    head_dims: tuple[int, int]
    tile: str
    backend: str  # as asked for: "auto", "fa2" or "fa3"
    sm90: bool  # whether the kernel for SM90 runs, if the tensors let it

    def __post_init__(self) -> None:
        self._device = self.memory.device.index
        self._stream = current_stream(self._device)  # on which the memory was made, and whose order guards it
        self._needs_direct = _needs_direct(self._device)

    @property
    def num_queries(self) -> int | None:
        """Query rows of all requests, unless only the GPU knows them."""
        return self.host.num_queries

    @property
    def kv_lens(self) -> list[int] | None:
        """Keys of each request, unless only the GPU knows them."""
        return self.host.kv_lens

    @property
    def kv_extent(self) -> int:
        """One more than the largest page (without pages: token) in use, 0 if only the GPU knows it."""
        return self.host.kv_extent

    def run(
        self,
        layout: Layout,
        arguments: _native._Run,
        soft_cap: bool,
        alibi: bool,
        custom_mask: torch.Tensor | None,
        rope_cos_sin: torch.Tensor | None,
        scales: GpuScales,
    ) -> None:
        """Queue a run on torch's current stream of the GPU; `arguments` are those of native code."""
        device = self._device
        stream = current_stream(device)
        if stream != self._stream:
            self._used_on(stream)
        q, k, v, out = arguments[:4]
        rope = rope_cos_sin is not None
        direct = rope or self._needs_direct or not layout.aligned or (q | k | v | out) % 16 != 0
        features = (direct, soft_cap, alibi, custom_mask is not None, rope)
        kernel = layout.kernels.get(features)
        if kernel is None:
            variant = Variant(*layout.dtypes, *self.head_dims, self.tile, Features(*features))
            lack = lack_of_brought(self.backend, Brought(layout.dtypes[1].itemsize, direct, rope, layout.mapped))
            kernel = layout.kernels[features] = load_attention(variant, device, self.sm90 and lack is None)
        mask_bytes = 0 if custom_mask is None else custom_mask.numel()
        positions = 0 if rope_cos_sin is None else rope_cos_sin.shape[0]
        while not self.native.run(layout.native, arguments, kernel, stream, _addresses(scales), mask_bytes, positions):
            self.memory.raise_fault()

    def refresh(self) -> None:
        """Queue the kernel that cuts the batch once more, for arrays on the GPU whose values have changed."""
        self.memory.raise_fault()
        stream = current_stream(self._device)
        if stream != self._stream:
            self._used_on(stream)
        self.native.schedule(load_schedule(self._device), stream)

    def _used_on(self, stream: int) -> None:
        """Keep the memory from other uses until what was queued on another stream is done."""
        self._stream = stream
        current = torch.cuda.current_stream(self.memory.device)
        for t in self.held:
            t.record_stream(current)


def _addresses(scales: GpuScales) -> tuple[int, int, int]:
    if scales is NO_GPU_SCALES:
        return 0, 0, 0
    q, k, v = (0 if scale is None else scale.data_ptr() for scale in scales)
    return q, k, v


def schedule(
    arrays: BatchArrays,
    memory: PlanMemory,
    names: ArgumentNames,
    *,
    num_kv_heads: int,
    group: int,
    head_dim_qk: int,
    head_dim_vo: int,
    causal: bool,
    window_left: int,
    fixed_split_size: int | None,
    disable_split_kv: bool,
    q_len_hint: float | None,
    kv_bytes: int,
    backend: str,
) -> CudaBatch:
    """Check a batch as far as it is in host memory, bring it to the GPU and queue the kernel that cuts it.

    `q_len_hint` is about the query rows of a request, where their numbers are on the GPU. `kv_bytes` is the size of an
    element of the cache. For the others see `AttentionPlan`.
    """
    memory.raise_fault()
    device = memory.device.index
    host = _check_on_host(arrays, group, names)
    invariant = disable_split_kv or fixed_split_size is not None
    if memory.tile is None or memory.buffers is None:
        memory.tile = "m128" if backend == "fa3" else _tile_of(arrays, host, group, q_len_hint, invariant)
    page_size = arrays.page_size or None
    sm90 = _runs_sm90(backend, memory.tile, head_dim_qk, head_dim_vo, kv_bytes, page_size, device)
    tile, num_ctas = _tile_and_ctas(memory.tile, head_dim_qk, head_dim_vo, kv_bytes, device, sm90)
    if disable_split_kv:
        fixed_chunk, slots = _NEVER_CUT, 0
    elif fixed_split_size is not None:
        fixed_chunk = fixed_split_size
        slots = _slots(arrays, host, fixed_chunk, tile.rows, group, num_kv_heads, names)
    else:
        fixed_chunk, slots = 0, 2 * num_ctas  # of which each cut tile takes less than twice its share

    slots = memory.slots(slots)
    placed = memory.place(arrays, names)
    most_requests = max(arrays.num_requests, memory.max_requests)
    head = memory.pool.reserve("work list", _SCHEDULE_BYTES + _REQUEST_BYTES * most_requests, torch.uint8, zero=True)
    partials, address, arrivals = memory.partials(slots, tile.rows, head_dim_vo)
    work_list = head.data_ptr()
    native = _native.CudaAttentionPlan(
        load_schedule(device),
        current_stream(device),
        placed.native,
        num_kv_heads,
        group,
        causal,
        window_left,
        tile.rows,
        tile.min_chunk,
        num_ctas,
        fixed_chunk,
        slots,
        work_list + _SCHEDULE_BYTES,
        work_list,
        memory.status,
        placed.page_table_size,
        address,
        address + 4 * slots * tile.rows * head_dim_vo,
        arrivals.data_ptr(),
    )
    held = (head, partials, arrivals, *placed.held)
    return CudaBatch(native, host, memory, held, (head_dim_qk, head_dim_vo), memory.tile, backend, sm90)


def _check_on_host(arrays: BatchArrays, group: int, names: ArgumentNames) -> _native.HostBatch:
    """Check query rows and keys, each if all that says where they are is in host memory."""
    tensors = arrays.tensors()
    on_gpu = {member for member, t in tensors.items() if not t.is_cpu}
    queries = "qo_indptr" not in on_gpu
    keys = on_gpu.isdisjoint(("kv_indptr", "kv_last_page_len", "kv_lens"))
    there = arrays.native({member: t.data_ptr() for member, t in tensors.items() if t.is_cpu})
    return _native.HostBatch(there, queries, keys, group, names.as_tuple())


@functools.cache
def _runs_sm90(
    backend: str, tile: str, dim_qk: int, dim_vo: int, kv_bytes: int, page_size: int | None, device: int
) -> bool:
    """Whether the kernel for SM90 runs a plan, if the tensors let it; refuse a backend that cannot."""
    capability = _native.cuda_device(device).compute_capability
    return lack_of_planned(backend, Planned(capability, tile, dim_qk, dim_vo, kv_bytes, page_size)) is None


@functools.cache
def _tile_and_ctas(
    name: str, dim_qk: int, dim_vo: int, kv_bytes: int, device: int, sm90: bool
) -> tuple[Tile | Sm90Tile, int]:
    """Return the tile for a kind, and how many CTAs walk such tiles on a GPU."""
    num_sms = _native.cuda_device(device).num_sms
    if sm90:
        return SM90_TILES[dim_qk, dim_vo], num_sms
    smem = smem_of(device)
    choose_tile(name, dim_qk, dim_vo, 2, smem.of_cta)  # refuses what does not fit
    tile = choose_tile(name, dim_qk, dim_vo, kv_bytes, smem.of_cta)
    return tile, ctas_per_sm(tile, dim_qk, dim_vo, kv_bytes, smem.of_sm) * num_sms


@functools.cache
def _needs_direct(device: int) -> bool:
    """Whether a GPU lacks the copies from global to shared memory, so that K and V go through registers."""
    return _native.cuda_device(device).compute_capability < 80


def _tile_of(
    arrays: BatchArrays, host: _native.HostBatch, group: int, q_len_hint: float | None, invariant: bool
) -> str:
    """Return the kind of tile for a batch; for results that must not depend on the batch, one that does not either."""
    if arrays.qo_indptr is None:
        return tile_name(arrays.q_len * group)
    if invariant:
        return "m128"
    if host.num_queries is not None:
        return tile_name(host.num_queries * group / max(1, arrays.num_requests))
    return "m128" if q_len_hint is None else tile_name(q_len_hint * group)


def _slots(
    arrays: BatchArrays,
    host: _native.HostBatch,
    chunk: int,
    tile_rows: int,
    group: int,
    num_kv_heads: int,
    names: ArgumentNames,
) -> int:
    """Return how many partial results a run has at most when keys are cut after every `chunk`."""
    if host.num_queries is not None and host.has_keys:
        return host.num_slots(chunk, tile_rows, group, num_kv_heads)
    if arrays.qo_indptr is not None or arrays.table is None:
        raise NotImplementedError(
            f"fixed_split_size: expected {names.qo_indptr} and the lengths of keys as CPU tensors, by which the "
            f"workspace is sized, got {chunk} with lengths on the GPU; pass CPU tensors, or disable_split_kv=True"
        )
    n, page = arrays.num_requests, arrays.page_size
    if arrays.kv_indptr is None:
        chunks = n * -(-arrays.table_size * page // chunk)
    else:
        chunks = n + arrays.table_size * page // chunk  # at most one of a request is not full
    return chunks * num_kv_heads * -(-arrays.q_len * group // tile_rows)
