// The number of tokens of each request, from its pages and the length of the last one: one thread a request.
#include "device/common/indices.cuh"
#include "device/page/params.h"
#include "device/ptx/memory.cuh"

namespace flashinfer_core::cuda {

extern "C" __global__ void FIC_KERNEL(const __grid_constant__ SeqLensParams p) {
  wait_for_previous_kernel();
  const int64_t request = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (request >= p.kv_last_page_len.size) return;
  const int64_t pages = read_index(p.kv_indptr, request + 1) - read_index(p.kv_indptr, request);
  const int64_t tokens = pages > 0 ? (pages - 1) * p.page_size + read_index(p.kv_last_page_len, request) : 0;
  p.out[request] = static_cast<int32_t>(tokens);
}

}  // namespace flashinfer_core::cuda
