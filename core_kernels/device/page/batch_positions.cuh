// The request and the position of each appended token: one thread a token, which searches append_indptr for its
// request. Tokens of no request get -1 and 0. A few kilobytes: the launch is what it costs.
#include "device/common/indices.cuh"
#include "device/page/params.h"
#include "device/ptx/memory.cuh"

namespace flashinfer_core::cuda {

extern "C" __global__ void FIC_KERNEL(const __grid_constant__ BatchPositionsParams p) {
  wait_for_previous_kernel();
  const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (token >= p.nnz) return;
  const int64_t request = segment_of(p.append_indptr, token);
  int64_t position = 0;
  if (request >= 0) position = read_index(p.seq_lens, request) - read_index(p.append_indptr, request + 1) + token;
  p.batch_indices[token * p.batch_indices_stride] = static_cast<int32_t>(request);
  p.positions[token * p.positions_stride] = static_cast<int32_t>(position);
}

}  // namespace flashinfer_core::cuda
