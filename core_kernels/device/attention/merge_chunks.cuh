// Merges the partial results of tiles whose keys were cut, after the attention kernel: see results.cuh.
//
// Each partial state has a CTA, which merges one of num_chunks shares of the tile's rows: so every CTA reads as much as
// one partial state holds, 64 KiB at 128 rows of 128 columns, from L2, whether a request was cut into two chunks or a
// hundred. On an H200 a shared prefix of 8,192 keys for 64 requests took 126 us with the merging in the attention
// kernel and 75 with this one. Without cut tiles every CTA ends at once: 1.5 us.
#include "device/attention/items.cuh"
#include "device/attention/results.cuh"
#include "device/ptx/memory.cuh"

namespace flashinfer_core::cuda {

extern "C" __global__ void __launch_bounds__(kMergeThreads) FIC_KERNEL(const __grid_constant__ AttentionParams p) {
  __shared__ Item item;
  wait_for_previous_kernel();
  const int slot = static_cast<int>(blockIdx.x);
  if (slot >= p.schedule->num_slots) return;
  if (threadIdx.x < 32) {
    const Item found = locate_slot(p, slot, p.schedule->chunk_len);
    if (threadIdx.x == 0) item = found;
  }
  __syncthreads();
  if (item.num_chunks == 1) return;
  const int shares = item.request.num_chunks;
  merge_rows<kMergeThreads>(p, item, kTileRows * item.chunk / shares, kTileRows * (item.chunk + 1) / shares);
}

}  // namespace flashinfer_core::cuda
