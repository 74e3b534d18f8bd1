// Conversions of float32 to and from the narrow floating-point types, rounding to nearest even. NaN stays NaN.
#pragma once

#include <cstdint>

namespace flashinfer_core::cuda {

__device__ inline float f16_to_float(uint16_t x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

__device__ inline float bf16_to_float(uint16_t x) { return __uint_as_float(static_cast<uint32_t>(x) << 16); }

// Two numbers in one register, the first in the low half.
__device__ inline uint32_t floats_to_f16x2(float low, float high) {
  uint32_t pair;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
  asm("{.reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}"
      : "=r"(pair)
      : "f"(low), "f"(high));
#endif
  return pair;
}

__device__ inline uint32_t floats_to_bf16x2(float low, float high) {
#if __CUDA_ARCH__ >= 800
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  const auto round = [](float x) {
    const uint32_t bits = __float_as_uint(x);
    return (x != x ? bits | 0x400000u : bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  };
  return round(low) | round(high) << 16;
#endif
}

// One number as FP8 with `kMantissa` bits of mantissa and the given exponent bias, in integer arithmetic. What is too
// large becomes the largest finite number, `kMax`.
template <int kMantissa, int kBias, uint32_t kMax>
__device__ inline uint32_t round_to_fp8(float x) {
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << 23;
  constexpr uint32_t kLargest = (kMax << (23 - kMantissa)) + kRebias;  // kMax as float32
  const uint32_t bits = __float_as_uint(x), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7fu;
  if (magnitude >= kLargest) return sign | kMax;
  if (magnitude < kRebias + (1u << 23)) {  // subnormal: the addition of a number with the right last place rounds
    const uint32_t last_place = kRebias + (static_cast<uint32_t>(24 - kMantissa) << 23);
    const float rounded = __uint_as_float(magnitude) + __uint_as_float(last_place);
    return sign | (__float_as_uint(rounded) - last_place);
  }
  const uint32_t half = (1u << (22 - kMantissa)) - 1u + (magnitude >> (23 - kMantissa) & 1u);
  return sign | (magnitude + half - kRebias) >> (23 - kMantissa);
}

// Two FP8 numbers in the low 16 bits, the first in the lowest; infinity and what is too large saturate.
__device__ inline uint32_t floats_to_e4m3x2(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return round_to_fp8<3, 7, 0x7e>(low) | round_to_fp8<3, 7, 0x7e>(high) << 8;
#endif
}
__device__ inline uint32_t floats_to_e5m2x2(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return round_to_fp8<2, 15, 0x7b>(low) | round_to_fp8<2, 15, 0x7b>(high) << 8;
#endif
}

}  // namespace flashinfer_core::cuda
