// Rotary position embedding of queries and keys.
//
// A CTA takes one or more whole tokens. Its threads first ask for their share of the heads, then make the tokens'
// cosines and sines, once for all heads, in shared memory, and then rotate. The work of a head is cut into tasks: a
// rotation of one vector of first elements and one of second elements of the pairs (half-split: half a rotary_dim
// apart; interleaved: side by side), or the copy of one vector of the elements that do not rotate. Vectors have 16
// bytes where the layout allows it, else one element. Each thread has two tasks in flight.
//
// Angles are position * frequency rounded to float32, as the models were trained with. A position outside of
// cos_sin_cache, or a token that belongs to no request, gives NaN: the indices are known to the GPU alone.
//
// Roofline: an element moves twice and costs 3 operations; the angles' 40 operations a pair are shared by all heads.
// DRAM bounds it: 40 us for 8192 tokens of 32 + 8 heads of 128 in bf16 at the 4.2 TB/s of an H200.
#include "device/common/indices.cuh"
#include "device/common/math.cuh"
#include "device/common/numbers.cuh"
#include "device/rope/params.h"

namespace flashinfer_core::cuda {
namespace {

using T = Number<DType{FIC_DTYPE}>;
constexpr bool kInterleave = FIC_INTERLEAVE, kCached = FIC_CACHED;
constexpr int kWidth = FIC_VECTORS ? 16 / T::kBytes : 1;
constexpr int kMaxThreads = 512;
constexpr int kInFlight = 2;

#if FIC_CACHED
using Launch = RopeLaunch;
#else
using Launch = RopeByFrequencyLaunch;
#endif

// For each token of this CTA the cosines of all pairs, then the sines.
extern __shared__ float4 shared_memory[];
__device__ float* tables() { return reinterpret_cast<float*>(shared_memory); }

__device__ void fill_tables(const Launch& p, int64_t first_token, int32_t tokens) {
  const float nan = __uint_as_float(0x7fc00000u);
  const int32_t half = static_cast<int32_t>(p.rope.rotary_dim / 2);
  for (int32_t i = threadIdx.x; i < tokens * half; i += blockDim.x) {
    const int32_t token = i / half, pair = i - token * half;
    float sine = nan, cosine = nan;
#if FIC_CACHED
    const int64_t position = read_index(p.positions, first_token + token);
    if (position >= 0 && position < p.cached_positions) {
      const float* row = p.rope.cos_sin_cache + position * p.rope.cos_sin_stride;
      cosine = row[pair];
      sine = row[half + pair];
    }
#else
    int64_t position = 0, request = 0;
    if (p.positions.data != nullptr) {
      position = read_index(p.positions, first_token + token);
    } else {
      request = segment_of(p.indptr, first_token + token);
      if (request >= 0) position = read_index(p.offsets, request) + first_token + token - read_index(p.indptr, request);
    }
    if (request >= 0) sin_cos(static_cast<float>(position) * p.frequencies[pair], &sine, &cosine);
#endif
    tables()[2 * half * token + pair] = cosine;
    tables()[2 * half * token + half + pair] = sine;
  }
}

__device__ void rotate_pair(float& a, float& b, float cosine, float sine) {
  const float first = a * cosine - b * sine;
  b = b * cosine + a * sine;
  a = first;
}

// Entries of the tables from `offset` on.
__device__ void load_floats(int32_t offset, float (&x)[kWidth]) {
  if constexpr (kWidth == 1) {
    x[0] = tables()[offset];
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; i += 4) {
      const float4 four = shared_memory[(offset + i) / 4];
      x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
  }
}

struct Task {
  Vector<T, kWidth> a, b;
  char* out;
  int32_t cosines;  // where those of its pairs begin in the tables; -1: a copy, of a alone

  __device__ void load(const Launch& p, int64_t first_token, int32_t index) {
    const int32_t tasks = p.rotations + p.copies;  // of a head
    const int32_t token_head = index / tasks, task = index - token_head * tasks;
    const int32_t token = token_head / p.num_heads;
    int64_t head = token_head - token * p.num_heads;
    const bool is_key = head >= p.rope.heads[0].num_heads;
    if (is_key) head -= p.rope.heads[0].num_heads;
    const RopeParams::Heads& x = p.rope.heads[is_key];

    const bool rotates = task < p.rotations;
    int64_t element = p.rope.rotary_dim + (task - p.rotations) * kWidth;
    if (rotates) element = task * (kInterleave ? 2 * kWidth : kWidth);
    const char* in = static_cast<const char*>(x.in) +
                     ((first_token + token) * x.in_stride_token + head * x.in_stride_head + element) * T::kBytes;
    out = static_cast<char*>(x.out) +
          ((first_token + token) * x.out_stride_token + head * x.out_stride_head + element) * T::kBytes;
    cosines = rotates ? token * static_cast<int32_t>(p.rope.rotary_dim) + task * kWidth : -1;
    a.load(in, 0);
    if (rotates) b.load(in, distance(p));
  }

  __device__ void finish(const Launch& p) {
    if (cosines >= 0) {
      float x[kWidth], y[kWidth], c[kWidth], s[kWidth];
      a.unpack(x);
      b.unpack(y);
      load_floats(cosines, c);
      load_floats(cosines + static_cast<int32_t>(p.rope.rotary_dim / 2), s);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if constexpr (kInterleave && kWidth > 1) {  // x holds the first half of the pairs, y the second
          float (&pairs)[kWidth] = i < kWidth / 2 ? x : y;
          rotate_pair(pairs[2 * i % kWidth], pairs[2 * i % kWidth + 1], c[i], s[i]);
        } else {
          rotate_pair(x[i], y[i], c[i], s[i]);
        }
      }
      a.pack(x);
      b.pack(y);
      b.store(out, distance(p));
    }
    a.store(out, 0);
  }

 private:
  static __device__ int64_t distance(const Launch& p) { return kInterleave ? kWidth : p.rope.rotary_dim / 2; }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kMaxThreads) FIC_KERNEL(const __grid_constant__ Launch p) {
  wait_for_previous_kernel();
  const int64_t first_token = static_cast<int64_t>(blockIdx.x) * p.tokens_per_cta;
  const int64_t tokens_left = p.rope.num_tokens - first_token;
  const int32_t tokens = tokens_left < p.tokens_per_cta ? static_cast<int32_t>(tokens_left) : p.tokens_per_cta;
  const int32_t end = tokens * p.num_heads * (p.rotations + p.copies);

  Task tasks[kInFlight];
  const auto load = [&](int32_t index) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int32_t at = index + i * static_cast<int32_t>(blockDim.x);
      if (at < end) tasks[i].load(p, first_token, at);
    }
  };
  int32_t index = threadIdx.x;
  load(index);
  fill_tables(p, first_token, tokens);
  __syncthreads();
  while (index < end) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (index + i * static_cast<int32_t>(blockDim.x) < end) tasks[i].finish(p);
    }
    index += kInFlight * static_cast<int32_t>(blockDim.x);
    load(index);
  }
}

}  // namespace flashinfer_core::cuda
