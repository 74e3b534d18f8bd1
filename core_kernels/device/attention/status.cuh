// Reports of faults to the host.
#pragma once

#include "device/attention/params.h"

namespace flashinfer_core::cuda {

// Any fault of many will do. Written at once, so that the host never sees half of it.
__device__ inline void report(AttentionStatus* status, Fault fault, int32_t request, int64_t value) {
  const uint64_t bits = static_cast<uint64_t>(value);
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(status), "r"(static_cast<int32_t>(fault)),
               "r"(request), "r"(static_cast<uint32_t>(bits)), "r"(static_cast<uint32_t>(bits >> 32))
               : "memory");
}

}  // namespace flashinfer_core::cuda
