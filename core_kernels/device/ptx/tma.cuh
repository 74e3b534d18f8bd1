// Bulk copies of boxes of tensors (TMA, SM90). A tensor map, made by the host, says where the tensor is, how large a
// box is, and how its rows are swizzled in shared memory; it must lie in a kernel's __grid_constant__ parameters.
#pragma once

#include <cstdint>

#include "device/common/tensor_map.h"

namespace flashinfer_core::cuda {

__device__ inline void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Whether this lane is the one, of a whole warp that comes here, that starts copies. The compiler knows that it is only
// one, and for any other condition searches for the lanes that want a copy.
__device__ inline bool elect_lane() {
  uint32_t elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
  return elected != 0;
}

// Copies the box at the coordinates, innermost first, to shared memory; its bytes count at the barrier. Elements
// outside of the tensor are zeros.
__device__ inline void copy_box(uint32_t shared, const TensorMap& map, uint32_t barrier, int x0, int x1, int x2, int x3,
                                int x4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, "
      "%7}], [%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}

}  // namespace flashinfer_core::cuda
