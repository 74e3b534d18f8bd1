// Reports of faults to the host.
#pragma once

#include "device/attention/params.h"
#include "device/ptx/copy.cuh"

namespace flashinfer_core::cuda {

// Any fault of many will do. Written at once, so that the host never sees half of it.
__device__ inline void report(AttentionStatus* status, Fault fault, int32_t request, int64_t value) {
  const uint64_t bits = static_cast<uint64_t>(value);
  store_volatile(status, make_uint4(static_cast<uint32_t>(fault), static_cast<uint32_t>(request),
                                    static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)));
}

}  // namespace flashinfer_core::cuda
