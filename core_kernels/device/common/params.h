// Pieces of the kernels' arguments that several operations share, on CPU and GPU alike: plain structs, filled by host
// code. Strides count elements, not bytes.
#pragma once

#include <cstdint>

namespace flashinfer_core {

enum class DType : int32_t { f32 = 0, f16 = 1, bf16 = 2, e4m3 = 3, e5m2 = 4 };

// A tensor seen as rows that are contiguous in themselves. Row r begins stride_outer * (r / inner) +
// stride_inner * (r % inner) elements after data, where `inner` is that of the operation.
struct Rows {
  void* data;
  int64_t stride_outer, stride_inner;
};

// A 1-D tensor of int32 or int64.
struct IndexArray {
  const void* data;
  bool wide;  // int64
  int64_t stride, size;
};

namespace cuda {

// How the threads of a CTA share out rows, of which there are fewer than 2^31: `threads` take one row, `per_cta` rows
// make a CTA. Up to 32 threads are a power of two, `1 << shift`, and stand in one warp; more are whole warps, and then
// the CTA has one row and shift is 31.
struct RowShape {
  int32_t threads, per_cta, shift;
};

}  // namespace cuda
}  // namespace flashinfer_core
