// The smallest kernel with what all of ours have: fixed-width integers, one struct, a macro of its own.
#pragma once

#include <cstdint>

struct Params {
  int32_t* out;
  int64_t size;
  constexpr bool has(int64_t i) const { return i < size; }  // without __device__, as in headers shared with the host
};

extern "C" __global__ void FIC_KERNEL(const __grid_constant__ Params p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (p.has(i)) p.out[i] = VALUE;
}
