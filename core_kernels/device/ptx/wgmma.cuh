// Warpgroup matrix products (wgmma, SM90a): 64 rows of A, in shared memory or in registers, times B in shared memory,
// with float32 sums. A warpgroup is four warps, of which each has 16 of the rows.
//
// A sum d[n][4] is laid out as that of mma.sync: with gr = lane / 4 and tq = lane % 4, d[n][0] and d[n][1] belong to
// row gr and columns 8 n + 2 tq and the next, d[n][2] and d[n][3] to row gr + 8.
//
// Products run asynchronously. Registers that one reads or writes must not be touched between its start and the wait
// for its group, and start_products() must stand between what wrote them and the product. The compiler only warns
// (C7508 to C7514) when it has to wait by itself, and the kernel is slow then.
#pragma once

#include <cstdint>

#include "device/ptx/mma.cuh"

namespace flashinfer_core::cuda {

__device__ inline void start_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `Pending` of the newest groups still run.
template <int Pending>
__device__ inline void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Tells the compiler that registers have changed, so that nothing that uses them moves ahead of this place.
template <int N>
__device__ inline void changed(float (&x)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(x[n][i])::"memory");
  }
}
template <int N>
__device__ inline void changed(uint32_t (&x)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(x[n][i])::"memory");
  }
}

// Moves registers between the warpgroups of a CTA: all four warps of one come here.
template <int Registers>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// An operand in shared memory: rows of 128 bytes (64 elements), swizzled (chunk c of row r at c ^ r % 8), from a
// multiple of 1024 bytes on. Of A, and of B = K^T, a row has neighbouring elements of the sum; `panel` is not used. Of
// B = V a row has neighbouring columns of the result, and the next 64 columns lie `panel` bytes further on. The other
// half of the descriptor is the same for all, so an operand takes one register.
struct Operand {
  uint32_t word;

  __device__ Operand(uint32_t address, uint32_t panel = 0) : word((address & 0x3ffffu) >> 4 | panel >> 4 << 16) {}

  // The descriptor of what lies some bytes further on.
  __device__ uint64_t at(int bytes) const {
    constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightRows = uint64_t{1024 >> 4} << 32;
    return (word + static_cast<uint32_t>(bytes >> 4)) | kEightRows | kSwizzle128;
  }
};

// Products of 64 x 16 by 16 x N elements; Math is HalfMath or BFloatMath.
template <class Math, int N>
struct Wgmma;

// The registers of a sum of 8 n columns: as a list of operands of the instruction, and as those of the statement.
#define FIC_LIST_48 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23"
#define FIC_LIST_64 FIC_LIST_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FIC_LIST_80 FIC_LIST_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FIC_LIST_96 FIC_LIST_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FIC_LIST_128 FIC_LIST_96 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FIC_LIST_160 FIC_LIST_128 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define FIC_LIST_192 FIC_LIST_160 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FIC_LIST_224 \
  FIC_LIST_192 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define FIC_LIST_256 \
  FIC_LIST_224 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FIC_SUM(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define FIC_SUMS_48 FIC_SUM(0), FIC_SUM(1), FIC_SUM(2), FIC_SUM(3), FIC_SUM(4), FIC_SUM(5)
#define FIC_SUMS_64 FIC_SUMS_48, FIC_SUM(6), FIC_SUM(7)
#define FIC_SUMS_80 FIC_SUMS_64, FIC_SUM(8), FIC_SUM(9)
#define FIC_SUMS_96 FIC_SUMS_80, FIC_SUM(10), FIC_SUM(11)
#define FIC_SUMS_128 FIC_SUMS_96, FIC_SUM(12), FIC_SUM(13), FIC_SUM(14), FIC_SUM(15)
#define FIC_SUMS_160 FIC_SUMS_128, FIC_SUM(16), FIC_SUM(17), FIC_SUM(18), FIC_SUM(19)
#define FIC_SUMS_192 FIC_SUMS_160, FIC_SUM(20), FIC_SUM(21), FIC_SUM(22), FIC_SUM(23)
#define FIC_SUMS_224 FIC_SUMS_192, FIC_SUM(24), FIC_SUM(25), FIC_SUM(26), FIC_SUM(27)
#define FIC_SUMS_256 FIC_SUMS_224, FIC_SUM(28), FIC_SUM(29), FIC_SUM(30), FIC_SUM(31)

// The numbers are those of the operands after the sum.
#define FIC_WGMMA(MATH, TYPE, N, I0, I1, I2, I3, I4)                                                                   \
  template <>                                                                                                          \
  struct Wgmma<MATH, N> {                                                                                              \
    /* d = a b, or d += a b; the rows of b are those of its transpose */                                               \
    static __device__ void multiply(float (&d)[N / 8][4], uint64_t a, uint64_t b, bool add) {                          \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #I2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE   \
                   "." TYPE " {" FIC_LIST_##N "}, %" #I0 ", %" #I1 ", p, 1, 1, 0, 0;}"                                 \
                   : FIC_SUMS_##N                                                                                      \
                   : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                                      \
    }                                                                                                                  \
    /* d += a b */                                                                                                     \
    static __device__ void multiply_add(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b) {                    \
      asm volatile("{.reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE \
                   " {" FIC_LIST_##N "}, {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 ", p, 1, 1, 1;}"             \
                   : FIC_SUMS_##N                                                                                      \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                              \
    }                                                                                                                  \
  };
#define FIC_WGMMAS(N, ...)                   \
  FIC_WGMMA(HalfMath, "f16", N, __VA_ARGS__) \
  FIC_WGMMA(BFloatMath, "bf16", N, __VA_ARGS__)

FIC_WGMMAS(48, 24, 25, 26, 27, 28)
FIC_WGMMAS(64, 32, 33, 34, 35, 36)
FIC_WGMMAS(80, 40, 41, 42, 43, 44)
FIC_WGMMAS(96, 48, 49, 50, 51, 52)
FIC_WGMMAS(128, 64, 65, 66, 67, 68)
FIC_WGMMAS(160, 80, 81, 82, 83, 84)
FIC_WGMMAS(192, 96, 97, 98, 99, 100)
FIC_WGMMAS(256, 128, 129, 130, 131, 132)

#undef FIC_WGMMAS
#undef FIC_WGMMA
#undef FIC_SUM

}  // namespace flashinfer_core::cuda
