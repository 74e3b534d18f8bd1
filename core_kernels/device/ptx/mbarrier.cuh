// Barriers in shared memory (mbarrier, SM90), which count arrivals of threads and bytes of bulk copies, and the named
// barriers of a CTA. A barrier is named by its address in shared memory.
#pragma once

#include <cstdint>

namespace flashinfer_core::cuda {

// A barrier whose phase ends after `arrivals` arrivals, and all bytes that were announced with them.
__device__ inline void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes this thread's new barriers visible to the copy engine; a __syncthreads() makes them visible to other threads.
__device__ inline void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of a parity is over: the first phase has parity 0, and the one before it, parity 1, always is.
__device__ inline void wait(uint32_t barrier, uint32_t parity) {
  uint32_t over;
  do {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(over)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (over == 0);
}

// Waits for the other threads, a whole number of warps, that name the same barrier; 0 is that of __syncthreads().
__device__ inline void sync_threads(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// Lets wgmma and the copy engine see what this thread has written to shared memory.
__device__ inline void publish_to_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace flashinfer_core::cuda
