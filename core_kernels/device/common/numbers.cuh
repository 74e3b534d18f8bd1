// Number types and vectors of them. A Vector holds numbers as they lie in memory, so it takes the fewest registers;
// arithmetic is on the floats that it unpacks to.
#pragma once

#include <cstdint>

#include "device/common/params.h"
#include "device/ptx/convert.cuh"
#include "device/ptx/memory.cuh"

namespace flashinfer_core::cuda {

// How a dtype is stored; `unpack` and `pack` convert the numbers of one 32-bit word.
template <DType>
struct Number;
template <>
struct Number<DType::f32> {
  static constexpr int kBytes = 4;
  using Bits = uint32_t;
  static __device__ void unpack(uint32_t word, float* x) { x[0] = __uint_as_float(word); }
  static __device__ uint32_t pack(const float* x) { return __float_as_uint(x[0]); }
};
template <>
struct Number<DType::f16> {
  static constexpr int kBytes = 2;
  using Bits = uint16_t;
  static __device__ void unpack(uint32_t word, float* x) {
    x[0] = f16_to_float(static_cast<uint16_t>(word));
    x[1] = f16_to_float(static_cast<uint16_t>(word >> 16));
  }
  static __device__ uint32_t pack(const float* x) { return floats_to_f16x2(x[0], x[1]); }
};
template <>
struct Number<DType::bf16> {
  static constexpr int kBytes = 2;
  using Bits = uint16_t;
  static __device__ void unpack(uint32_t word, float* x) {
    x[0] = __uint_as_float(word << 16);
    x[1] = __uint_as_float(word & 0xffff0000u);
  }
  static __device__ uint32_t pack(const float* x) { return floats_to_bf16x2(x[0], x[1]); }
};
template <>
struct Number<DType::e4m3> {
  static constexpr int kBytes = 1;
  using Bits = uint8_t;
  static __device__ uint32_t pack(const float* x) {
    return floats_to_e4m3x2(x[0], x[1]) | floats_to_e4m3x2(x[2], x[3]) << 16;
  }
};
template <>
struct Number<DType::e5m2> {
  static constexpr int kBytes = 1;
  using Bits = uint8_t;
  static __device__ uint32_t pack(const float* x) {
    return floats_to_e5m2x2(x[0], x[1]) | floats_to_e5m2x2(x[2], x[3]) << 16;
  }
};

// N numbers: one, at any address that is a multiple of its size, or whole words, at multiples of 4, 8 or 16 bytes.
template <class T, int N>
struct Vector {
  static_assert(N * T::kBytes % 4 == 0, "whole words");
  uint32_t words[N * T::kBytes / 4];

  // Offsets count numbers from the pointer on.
  __device__ void load(const void* p, int64_t offset) {
    load_streamed(words, static_cast<const char*>(p) + offset * T::kBytes);
  }
  __device__ void load_weight(const void* p, int64_t offset) {
    load_shared_by_all(words, static_cast<const char*>(p) + offset * T::kBytes);
  }
  __device__ void store(void* p, int64_t offset) const {
    store_streamed(static_cast<char*>(p) + offset * T::kBytes, words);
  }
  __device__ void unpack(float (&x)[N]) const {
    constexpr int kPerWord = 4 / T::kBytes;
#pragma unroll
    for (int i = 0; i < N / kPerWord; ++i) T::unpack(words[i], x + i * kPerWord);
  }
  __device__ void pack(const float (&x)[N]) {
    constexpr int kPerWord = 4 / T::kBytes;
#pragma unroll
    for (int i = 0; i < N / kPerWord; ++i) words[i] = T::pack(x + i * kPerWord);
  }
};

template <class T>
struct Vector<T, 1> {
  typename T::Bits bits;

  __device__ void load(const void* p, int64_t offset) { bits = static_cast<const typename T::Bits*>(p)[offset]; }
  __device__ void load_weight(const void* p, int64_t offset) { load(p, offset); }
  __device__ void store(void* p, int64_t offset) const { static_cast<typename T::Bits*>(p)[offset] = bits; }
  __device__ void unpack(float (&x)[1]) const {
    float word[4 / T::kBytes];
    T::unpack(bits, word);
    x[0] = word[0];
  }
  __device__ void pack(const float (&x)[1]) {
    float word[4 / T::kBytes] = {x[0]};
    bits = static_cast<typename T::Bits>(T::pack(word));
  }
};

}  // namespace flashinfer_core::cuda
