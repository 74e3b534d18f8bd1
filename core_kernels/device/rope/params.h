#pragma once

#include "device/common/params.h"

namespace flashinfer_core {

// Rotates the first rotary_dim elements of every head of q and k by angles that depend on the token's position, and
// copies the others. in and out may be the same memory.
struct RopeParams {
  struct Heads {
    const void* in;  // [tokens, num_heads, head_dim]
    int64_t in_stride_token, in_stride_head;
    void* out;
    int64_t out_stride_token, out_stride_head;
    int64_t num_heads;
  };
  DType dtype;
  bool interleave;  // pairs are (2i, 2i + 1) if true, (i, i + rotary_dim / 2) if false
  int64_t num_tokens, head_dim, rotary_dim;
  Heads heads[2];            // q, k
  const int64_t* positions;  // [tokens], CPU only
  const float* frequencies;  // [rotary_dim / 2] radians a position, CPU only; null: the angles come from cos_sin_cache
  const float* cos_sin_cache;  // [positions, rotary_dim]: cosines, then sines
  int64_t cos_sin_stride;
};

namespace cuda {

struct RopeLaunch {
  RopeParams rope;
  IndexArray positions;  // [tokens]; data null: token i of request b is at offsets[b] + i - indptr[b]
  IndexArray indptr, offsets;
  int64_t cached_positions;  // rows of cos_sin_cache
  int32_t tokens_per_cta;
  int32_t num_heads;          // of q and k
  int32_t rotations, copies;  // tasks of a head, see rope.cuh
};

// Frequencies travel as arguments: unlike a tensor made at first use they need no copy to the GPU, which would
// synchronize, and which a CUDA graph under capture would put off.
constexpr int32_t kMaxFrequencies = 768;
struct RopeByFrequencyLaunch : RopeLaunch {
  float frequencies[kMaxFrequencies];
};

}  // namespace cuda
}  // namespace flashinfer_core
