// Copies from global to shared memory that pass by the registers (SM80 and later), and shared-memory addresses.
#pragma once

#include <cstdint>

namespace flashinfer_core::cuda {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes, or writes 16 zeros if `copy` is false; the source must be a valid address even then. Goes past L1:
// a key or value is read by one CTA once.
__device__ inline void cp_async_16(uint32_t shared, const void* global, bool copy) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(copy ? 16 : 0)
               : "memory");
}

__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `Pending` of this thread's newest groups are still under way.
template <int Pending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

__device__ inline void prefetch(const void* global) { asm volatile("prefetch.global.L1 [%0];" ::"l"(global)); }

// One store of 16 bytes that is neither split nor delayed.
__device__ inline void store_volatile(void* global, uint4 x) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

__device__ inline void store_shared(uint32_t address, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}
__device__ inline void store_shared(uint32_t address, uint2 x) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(x.x), "r"(x.y) : "memory");
}
__device__ inline void store_shared(uint32_t address, uint16_t x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(x) : "memory");
}

}  // namespace flashinfer_core::cuda
