// Rows: where they lie, which threads share them, and sums over them.
#pragma once

#include <cstdint>

#include "device/common/params.h"

namespace flashinfer_core::cuda {

constexpr int kMaxRowThreads = 512;

// The two indices of a row, see struct Rows. Most tensors have one block of rows and no need of the long division.
struct RowIndex {
  int64_t outer, inner;
};
template <class Int>
__device__ inline RowIndex row_index(Int row, Int inner) {
  if (row < inner) return {0, static_cast<int64_t>(row)};
  const Int outer = row / inner;
  return {static_cast<int64_t>(outer), static_cast<int64_t>(row - outer * inner)};
}

template <class T>
__device__ inline void* row_at(const Rows& rows, RowIndex index) {
  const int64_t offset = index.outer * rows.stride_outer + index.inner * rows.stride_inner;
  return static_cast<char*>(rows.data) + offset * T::kBytes;
}

// The row of this thread, and its place among the threads of that row.
struct RowPlace {
  int32_t row, lane;
};
__device__ inline RowPlace row_place(const RowShape& shape) {
  const uint32_t in_cta = shape.shift == 31 ? 0 : threadIdx.x >> shape.shift;
  return {static_cast<int32_t>(blockIdx.x * shape.per_cta + in_cta),
          static_cast<int32_t>(threadIdx.x - (in_cta << shape.shift))};
}

// The sum over the threads of a row, the same bits in each of them. All threads of the CTA must call it, each time with
// another `scratch`.
__device__ inline float row_sum(float x, const RowShape& shape, float (&scratch)[kMaxRowThreads / 32]) {
#pragma unroll
  for (int32_t offset = 16; offset > 0; offset /= 2) {
    if (offset < shape.threads) x += __shfl_xor_sync(0xffffffffu, x, offset);
  }
  if (shape.threads <= 32) return x;
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int32_t warp = 0; warp < kMaxRowThreads / 32; ++warp) {  // unrolled, so that one latency serves all loads
    sum += warp < shape.threads / 32 ? scratch[warp] : 0.0f;
  }
  return sum;
}

}  // namespace flashinfer_core::cuda
