// A tensor map of the copy engine (TMA), which the driver makes: opaque, and the same on the host and the device.
#pragma once

#include <cstdint>

namespace flashinfer_core::cuda {

struct alignas(64) TensorMap {
  uint64_t words[16];
};

}  // namespace flashinfer_core::cuda
