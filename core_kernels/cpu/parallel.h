// Work sharing for the CPU kernels. Included inside each instruction set's namespace, see vec.h.
#pragma once

#include <cstdint>

#include "host/threads.h"

namespace flashinfer_core::FIC_ISA {

// Calls f(begin, end) for consecutive ranges that cover [0, n). Ranges have `grain` elements (the last may be shorter)
// and are taken by whichever thread is free, so uneven ranges balance. Below two ranges no thread is woken.
template <class F>
void parallel_ranges(int64_t n, int64_t grain, const F& f) {
  if (n <= 0) return;
  const int64_t ranges = (n + grain - 1) / grain;
  const int64_t most = max_threads();
  const int threads = static_cast<int>(ranges < most ? ranges : most);
  if (threads <= 1) {
    f(int64_t{0}, n);
    return;
  }
  struct Shared {
    const F& f;
    int64_t n, grain, next;
  } shared{f, n, grain, 0};
  run_team(
      threads,
      [](void* arg) {
        auto& s = *static_cast<Shared*>(arg);
        for (;;) {
          const int64_t begin = __atomic_fetch_add(&s.next, s.grain, __ATOMIC_RELAXED);
          if (begin >= s.n) return;
          s.f(begin, begin + s.grain < s.n ? begin + s.grain : s.n);
        }
      },
      &shared);
}

// Rows of `row_bytes` each that make a range worth waking a thread for: about 32 KiB of traffic, some 2 us of one core.
inline int64_t rows_per_range(int64_t row_bytes) {
  const int64_t rows = 32768 / (row_bytes < 1 ? 1 : row_bytes);
  return rows < 1 ? 1 : rows;
}

}  // namespace flashinfer_core::FIC_ISA
