// Vectors of float for the CPU kernels, on GNU vector extensions so that one source serves every instruction set.
//
// Everything here lives in namespace flashinfer_core::<instruction set>, and kernel files use nothing from the standard
// library that the compiler could emit as a shared inline function: the linker keeps one copy of such a function, and
// it must not be the AVX-512 one.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#ifndef FIC_ISA
#error "FIC_ISA names the instruction set, see CMakeLists.txt"
#endif

#define FIC_INLINE inline __attribute__((always_inline))

namespace flashinfer_core::FIC_ISA {

#if defined(__AVX512F__)
constexpr int W = 16;  // floats in a vector
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float VecF __attribute__((vector_size(W * 4)));
typedef int32_t VecI __attribute__((vector_size(W * 4)));
typedef uint32_t VecU __attribute__((vector_size(W * 4)));
typedef uint16_t VecH __attribute__((vector_size(W * 2)));

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
struct e4m3 {
  uint8_t bits;
};
struct e5m2 {
  uint8_t bits;
};

FIC_INLINE VecF splat(float x) { return x - VecF{}; }
FIC_INLINE VecF as_float(VecI x) { return reinterpret_cast<VecF>(x); }
FIC_INLINE VecI as_int(VecF x) { return reinterpret_cast<VecI>(x); }
FIC_INLINE VecF max(VecF a, VecF b) { return a > b ? a : b; }
FIC_INLINE VecF min(VecF a, VecF b) { return a < b ? a : b; }
template <class T>
FIC_INLINE T min_of(T a, T b) {
  return b < a ? b : a;
}
template <class T>
FIC_INLINE T max_of(T a, T b) {
  return a < b ? b : a;
}

// ---- one element ----------------------------------------------------------------------------------------------------

FIC_INLINE float to_float(float x) { return x; }
FIC_INLINE float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}
FIC_INLINE float to_float(f16 x) {
  // Subnormal halves come out right because the multiplication by 2^112 normalises them.
  const uint32_t magnitude = (static_cast<uint32_t>(x.bits) & 0x7fffu) << 13;
  uint32_t bits;
  float y;
  memcpy(&y, &magnitude, 4);
  y *= 0x1p112f;
  memcpy(&bits, &y, 4);
  if ((x.bits & 0x7c00u) == 0x7c00u) bits |= 0x7f800000u;
  bits |= (static_cast<uint32_t>(x.bits) & 0x8000u) << 16;
  memcpy(&y, &bits, 4);
  return y;
}

template <class T>
T from_float(float x);
template <>
FIC_INLINE float from_float<float>(float x) {
  return x;
}
template <>
FIC_INLINE bf16 from_float<bf16>(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
template <>
FIC_INLINE f16 from_float<f16>(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};   // NaN
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds past 65504
  if (magnitude < 0x38800000u) {  // subnormal half: let the addition of 0.5 do the rounding
    float y;
    memcpy(&y, &magnitude, 4);
    y += 0.5f;
    uint32_t rounded;
    memcpy(&rounded, &y, 4);
    return {static_cast<uint16_t>(sign | (rounded - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u;
  return {static_cast<uint16_t>(sign | (rounded >> 13))};
}

// One number as FP8 with `kMantissa` bits of mantissa and the given exponent bias. Infinity, and what is too large,
// become the largest finite number, `kMax`.
template <int kMantissa, int kBias, uint32_t kMax>
FIC_INLINE uint8_t round_to_fp8(float x) {
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << 23;
  constexpr uint32_t kLargest = (kMax << (23 - kMantissa)) + kRebias;  // kMax as float32
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);  // NaN
  if (magnitude >= kLargest) return static_cast<uint8_t>(sign | kMax);
  if (magnitude < kRebias + (1u << 23)) {  // subnormal: the addition of a number with the right last place rounds
    const uint32_t last_place = kRebias + (static_cast<uint32_t>(24 - kMantissa) << 23);
    float y, z;
    memcpy(&y, &magnitude, 4);
    memcpy(&z, &last_place, 4);
    y += z;
    uint32_t rounded;
    memcpy(&rounded, &y, 4);
    return static_cast<uint8_t>(sign | (rounded - last_place));
  }
  const uint32_t half = (1u << (22 - kMantissa)) - 1u + ((magnitude >> (23 - kMantissa)) & 1u);
  return static_cast<uint8_t>(sign | ((magnitude + half - kRebias) >> (23 - kMantissa)));
}
template <>
FIC_INLINE e4m3 from_float<e4m3>(float x) {
  return {round_to_fp8<3, 7, 0x7e>(x)};
}
template <>
FIC_INLINE e5m2 from_float<e5m2>(float x) {
  return {round_to_fp8<2, 15, 0x7b>(x)};
}

// ---- W elements -----------------------------------------------------------------------------------------------------

FIC_INLINE VecF load(const float* p) {
  VecF v;
  memcpy(&v, p, sizeof v);
  return v;
}
FIC_INLINE VecF load(const bf16* p) {
  VecH h;
  memcpy(&h, p, sizeof h);
  return reinterpret_cast<VecF>(__builtin_convertvector(h, VecU) << 16);
}
FIC_INLINE VecF load(const f16* p) {
#if defined(__AVX512F__)
  // maskz, here and in the store: GCC 12 warns of an uninitialised operand inside the plain forms.
  return reinterpret_cast<VecF>(_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__F16C__)
  return reinterpret_cast<VecF>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  VecF v;
  for (int i = 0; i < W; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}

FIC_INLINE void store(float* p, VecF v) { memcpy(p, &v, sizeof v); }
FIC_INLINE void store(bf16* p, VecF v) {
#if defined(__AVX512BF16__)
  // One instruction for ten. It takes subnormal numbers, below 1.2e-38, for zero; the other instruction sets keep them.
  const __m256bh h = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(v));
#else
  const VecU bits = reinterpret_cast<VecU>(v);
  const VecU rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const VecH h = __builtin_convertvector(v == v ? rounded : (bits >> 16) | 0x40u, VecH);
#endif
  memcpy(p, &h, sizeof h);
}
FIC_INLINE void store(f16* p, VecF v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtps_ph(0xffff, reinterpret_cast<__m512>(v), 0));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(reinterpret_cast<__m256>(v), 0));
#else
  for (int i = 0; i < W; ++i) p[i] = from_float<f16>(v[i]);
#endif
}

FIC_INLINE void store(e4m3* p, VecF v) {
  for (int i = 0; i < W; ++i) p[i] = from_float<e4m3>(v[i]);
}
FIC_INLINE void store(e5m2* p, VecF v) {
  for (int i = 0; i < W; ++i) p[i] = from_float<e5m2>(v[i]);
}

// The first n < W elements; the rest of the vector is zero, and nothing past them is touched in memory.
template <class T>
FIC_INLINE VecF load_n(const T* p, int n) {
  T buffer[W] = {};
  memcpy(buffer, p, static_cast<size_t>(n) * sizeof(T));
  return load(buffer);
}
template <class T>
FIC_INLINE void store_n(T* p, VecF v, int n) {
  T buffer[W];
  store(buffer, v);
  memcpy(p, buffer, static_cast<size_t>(n) * sizeof(T));
}

// Asks for all cache lines of n values, into the second-level cache.
template <class T>
FIC_INLINE void prefetch(const T* p, int n) {
  const char* line = reinterpret_cast<const char*>(p);
  for (const char* end = line + static_cast<size_t>(n) * sizeof(T); line < end; line += 64) {
    __builtin_prefetch(line, 0, 2);
  }
}

template <int S, int... Lane>
FIC_INLINE VecF swap_lanes(VecF v, std::integer_sequence<int, Lane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(v, v, (Lane ^ S)...);
#else
  return __builtin_shuffle(v, VecI{(Lane ^ S)...});
#endif
}

// Combines all lanes in a tree; every lane of the result holds the total.
template <class F>
FIC_INLINE VecF across(VecF v, const F& f) {
  constexpr auto lanes = std::make_integer_sequence<int, W>{};
  if constexpr (W > 8) v = f(v, swap_lanes<8>(v, lanes));
  if constexpr (W > 4) v = f(v, swap_lanes<4>(v, lanes));
  v = f(v, swap_lanes<2>(v, lanes));
  return f(v, swap_lanes<1>(v, lanes));
}
FIC_INLINE float sum(VecF v) {
  return across(v, [](VecF a, VecF b) { return a + b; })[0];
}
FIC_INLINE float max_element(VecF v) {
  return across(v, [](VecF a, VecF b) { return max(a, b); })[0];
}

// 2^f on [-0.5, 0.5]: a fit of the relative error, which is 2e-9.
FIC_INLINE VecF exp2_fraction(VecF f) {
  VecF p = splat(1.533757682e-4f);
  p = p * f + 1.339986036e-3f;
  p = p * f + 9.618519534e-3f;
  p = p * f + 5.550328998e-2f;
  p = p * f + 2.402264661e-1f;
  p = p * f + 6.931472056e-1f;
  p = p * f + 1.0f;
  return p;
}

// 2^x to 1 ulp or so; exactly 0 below 2^-126, infinity from 2^128 on, NaN for NaN.
FIC_INLINE VecF exp2(VecF x) {
  const VecF magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer kept in the low bits
  const VecF clamped = x > 127.5f ? splat(127.5f) : (x < -126.0f ? splat(-126.0f) : x);
  const VecF shifted = clamped + magic;
  const VecF f = clamped - (shifted - magic);
  const VecF p = exp2_fraction(f);
  // Two steps, since 2^128 alone has no exponent field.
  const VecI n = as_int(shifted) - as_int(magic);
  const VecI half = n >> 1;
  const VecF scaled = p * as_float((half + 127) << 23) * as_float((n - half + 127) << 23);
  const VecF upper = x >= 128.0f ? splat(__builtin_inff()) : scaled;
  return x < -126.0f ? VecF{} : (x == x ? upper : x);
}

// 2^x for x <= 0, as softmax needs it: half the work of exp2. Exactly 0 below -126.5, NaN for NaN.
FIC_INLINE VecF exp2_nonpositive(VecF x) {
  const VecF magic = splat(12582912.0f + 127.0f);  // puts the biased exponent into the low bits
  const VecF clamped = max(splat(-127.0f), x);     // in this order NaN stays NaN
  const VecF shifted = clamped + magic;
  const VecF f = clamped - (shifted - magic);
  const VecF p = exp2_fraction(f);
  return p * as_float(as_int(shifted) << 23);
}

FIC_INLINE VecF exp(VecF x) { return exp2(x * 1.44269504088896341f); }

// tanh(x) = 1 - 2 / (1 + e^(2x)); absolute error near 1e-7 everywhere.
FIC_INLINE VecF tanh(VecF x) { return 1.0f - 2.0f / (1.0f + exp(2.0f * x)); }

}  // namespace flashinfer_core::FIC_ISA
