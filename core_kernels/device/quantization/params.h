#pragma once

#include "device/common/params.h"

namespace flashinfer_core::cuda {

struct PackBitsParams {
  const void* x;         // integers; anything other than 0 is a 1
  int32_t element_size;  // bytes: 1, 2, 4 or 8
  int64_t stride, size;
  bool little;            // the first element of a byte is its lowest bit
  IndexArray indptr;      // segments of x; data null: all of x is one
  IndexArray out_indptr;  // the segments' first bytes in out
  uint8_t* out;
  int64_t out_size;  // at least out_indptr[-1]
};

}  // namespace flashinfer_core::cuda
