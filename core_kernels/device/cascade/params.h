#pragma once

#include "device/common/params.h"

namespace flashinfer_core {

// One partial attention result: v [tokens, heads, dim] and its base-2 log-sum-exp s [tokens, heads].
struct StateView {
  const void* v;
  int64_t v_stride_token, v_stride_head;
  const float* s;
  int64_t s_stride_token, s_stride_head;
};

struct MergeStatesParams {
  DType dtype;
  int64_t num_tokens;
  int32_t num_heads, head_dim, num_states;
  // State 0 is first, state i is second moved on by i - 1 strides.
  StateView first, second;
  int64_t v_stride_state, s_stride_state;
  void* v_out;  // may be the v of the first state, likewise s_out
  int64_t v_out_stride_token, v_out_stride_head;
  float* s_out;
  int64_t s_out_stride_token, s_out_stride_head;
  const uint8_t* mask;  // [tokens]: a token whose byte is 0 is not written; or null
};

namespace cuda {

struct MergeLaunch {
  MergeStatesParams merge;
  RowShape shape;  // a row is a head of a token; at most 32 threads share it
};

}  // namespace cuda
}  // namespace flashinfer_core
