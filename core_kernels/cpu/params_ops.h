// Arguments of the small operations: norms, rotary embedding, gated activations, writes into a paged KV cache. Plain
// structs, filled by host/bind_ops.cpp, which has checked every index in them. Strides count elements, not bytes.
#pragma once

#include "cpu/params.h"

namespace flashinfer_core {

// A tensor seen as rows that are contiguous in themselves. Row r begins stride_outer * (r / inner) +
// stride_inner * (r % inner) elements after data, where `inner` is that of the operation.
struct Rows {
  void* data;
  int64_t stride_outer, stride_inner;
};

// x = in (+ residual, which is then set to x), in float32 and not yet rounded. RMSNorm: out = x / rms(x) *
// (weight_offset + weight). Layer norm: out = (x - mean(x)) / deviation(x) * weight + bias.
struct NormParams {
  DType dtype, weight_dtype;  // weight_dtype is dtype or f32
  bool layer_norm;
  int64_t outer, inner, dim;
  Rows in, out, residual;  // residual.data null: none
  const void* weight;      // [dim]
  const void* bias;        // [dim], of weight_dtype; used by layer norm only
  float weight_offset, eps;
};

// out = activation(first half of in) * second half of in, each half `dim` long.
enum class Activation : int32_t { silu = 0, gelu = 1, gelu_tanh = 2 };

struct ActivationParams {
  DType dtype;
  Activation kind;
  int64_t outer, inner, dim;
  Rows in, out;
};

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
  Heads heads[2];              // q, k
  const int64_t* positions;    // [tokens]
  const float* frequencies;    // [rotary_dim / 2] radians a position; null: the angles come from cos_sin_cache
  const float* cos_sin_cache;  // [positions, rotary_dim]: cosines, then sines
  int64_t cos_sin_stride;
};

// Token t's key and value go to slot slots[t] % page_size of page slots[t] / page_size; a negative slot skips it.
struct AppendPagedKvParams {
  struct Stream {
    DType in_dtype, cache_dtype;  // read only if the two differ
    bool same_dtype;              // then the bytes are copied, whatever they mean
    int32_t element_size;         // bytes of an element, of both if same_dtype
    int64_t dim;
    const void* in;  // [tokens, num_heads, dim]
    int64_t in_stride_token, in_stride_head;
    void* cache;  // [pages, page_size, num_heads, dim]
    int64_t cache_stride_page, cache_stride_slot, cache_stride_head;
  };
  int64_t num_tokens, num_heads, page_size;
  Stream streams[2];     // keys, values
  const int64_t* slots;  // [tokens]
};

}  // namespace flashinfer_core
