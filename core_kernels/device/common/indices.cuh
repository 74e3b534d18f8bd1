// Reading index tensors, whose values nobody has checked: callers compare them with the sizes of what they index.
#pragma once

#include <cstdint>

#include "device/common/params.h"

namespace flashinfer_core::cuda {

__device__ inline int64_t read_index(const IndexArray& array, int64_t i) {
  return array.wide ? static_cast<const int64_t*>(array.data)[i * array.stride]
                    : static_cast<const int32_t*>(array.data)[i * array.stride];
}

// The b with indptr[b] <= x < indptr[b + 1], or -1 if there is none. Stays inside of indptr even if that is not sorted.
__device__ inline int64_t segment_of(const IndexArray& indptr, int64_t x) {
  int64_t low = 0, high = indptr.size - 1;
  while (low + 1 < high) {
    const int64_t middle = (low + high) / 2;
    (read_index(indptr, middle) <= x ? low : high) = middle;
  }
  return high > 0 && read_index(indptr, low) <= x && x < read_index(indptr, low + 1) ? low : -1;
}

}  // namespace flashinfer_core::cuda
