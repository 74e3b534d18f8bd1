// Warp-level matrix products (mma.sync m16n8k16, float32 sums) and the loads that feed them.
//
// With gr = lane / 4 and tq = lane % 4 a lane holds
//   A (16 x 16)  a[0] = A[gr][2 tq, 2 tq + 1], a[1] = A[gr + 8][same], a[2] = A[gr][2 tq + 8, 2 tq + 9], a[3] = A[gr +
//   8][..] B (16 x 8)   b0 = B[2 tq, 2 tq + 1][gr], b1 = B[2 tq + 8, 2 tq + 9][gr] C (16 x 8)   c[0], c[1] = C[gr][2
//   tq, 2 tq + 1], c[2], c[3] = C[gr + 8][same]
#pragma once

#include <cstdint>

#include "device/ptx/convert.cuh"

namespace flashinfer_core::cuda {

// Loads 8 x 8 matrices of 16-bit elements: lane 8 i + r gives the address of row r (16 bytes) of matrix i. Register i
// holds matrix i in the layout of half a B operand, or of its transpose.
__device__ inline void ldmatrix_x4(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address));
}
__device__ inline void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address));
}
__device__ inline void ldmatrix_x2(uint32_t (&d)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(d[0]), "=r"(d[1]) : "r"(address));
}
__device__ inline void ldmatrix_x2_trans(uint32_t (&d)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(d[0]), "=r"(d[1])
               : "r"(address));
}

// The two 16-bit types that matrix products take.
struct HalfMath {
  static __device__ uint32_t pack(float low, float high) { return floats_to_f16x2(low, high); }
  static __device__ float unpack(uint16_t x) { return f16_to_float(x); }
  static __device__ uint32_t from_half2(uint32_t x) { return x; }
  static __device__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    half_mma(c, a[0], a[1], b0);
    half_mma(c, a[2], a[3], b1);
#endif
  }

 private:
  static __device__ void half_mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(b));
  }
};

struct BFloatMath {  // SM80 and later
  static __device__ uint32_t pack(float low, float high) { return floats_to_bf16x2(low, high); }
  static __device__ float unpack(uint16_t x) { return bf16_to_float(x); }
  static __device__ uint32_t from_half2(uint32_t x) {
    return pack(HalfMath::unpack(static_cast<uint16_t>(x & 0xffff)), HalfMath::unpack(static_cast<uint16_t>(x >> 16)));
  }
  static __device__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

// The two FP8 types, as caches hold them; both fit into f16 without loss.
struct E4M3 {
  static __device__ uint32_t to_half2(uint32_t pair) {  // of the low two bytes
    uint32_t d;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(static_cast<uint16_t>(pair)));
#else
    // Shifted into place the exponent is 8 too small; the one NaN pattern (all bits but the sign) needs a hand.
    const uint32_t wide = __byte_perm(pair, 0, 0x1404);  // byte 1 and byte 0 as the high bytes of two halves
    const uint32_t magnitude = (wide >> 1) & 0x3f803f80u;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(d) : "r"(magnitude), "r"(0x5c005c00u));  // 2^8
    d |= wide & 0x80008000u;
    if ((magnitude & 0x3f80u) == 0x3f80u) d |= 0x7fffu;
    if ((magnitude & 0x3f800000u) == 0x3f800000u) d |= 0x7fff0000u;
#endif
    return d;
  }
};
struct E5M2 {
  static __device__ uint32_t to_half2(uint32_t pair) { return __byte_perm(pair, 0, 0x1404); }
};

// Four FP8 numbers as two registers of two 16-bit numbers.
template <class Math, class Fp8>
__device__ inline void unpack_fp8(uint32_t four, uint32_t& low, uint32_t& high) {
  low = Math::from_half2(Fp8::to_half2(four));
  high = Math::from_half2(Fp8::to_half2(four >> 16));
}

}  // namespace flashinfer_core::cuda
