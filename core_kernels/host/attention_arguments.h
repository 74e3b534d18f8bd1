// How Python hands over what attention works on: tensors as addresses, 0 for one that is absent.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <tuple>

#include "host/batch.h"

namespace flashinfer_core {

using Address = uintptr_t;

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

// The members of BatchArrays, in order.
using BatchTuple = std::tuple<int64_t, Address, int32_t, int32_t, Address, int64_t, int64_t, Address, Address, Address,
                              Address, int64_t>;

inline BatchArrays batch_arrays(const BatchTuple& batch) {
  const auto& [num_requests, qo_indptr, q_len, page_size, table, table_size, row_stride, kv_indptr, kv_last_page_len,
               kv_lens, rows, num_rows] = batch;
  return {num_requests,
          pointer<const int32_t>(qo_indptr),
          q_len,
          page_size,
          pointer<const int32_t>(table),
          table_size,
          row_stride,
          pointer<const int32_t>(kv_indptr),
          pointer<const int32_t>(kv_last_page_len),
          pointer<const int32_t>(kv_lens),
          pointer<const int32_t>(rows),
          num_rows};
}

// The members of ArgumentNames, in order.
using NamesTuple = std::array<std::string, 7>;

inline ArgumentNames argument_names(const NamesTuple& names) {
  return {names[0], names[1], names[2], names[3], names[4], names[5], names[6]};
}

// What a run needs to know of its tensors besides their addresses. Layers of a model share it, so it is made once.
struct TensorLayout {
  int dtype_q, dtype_kv, dtype_o;
  int64_t q_tokens, num_pages;  // rows of q; pages (without pages: tokens) that K and V both have
  std::array<int64_t, 2> q, o;  // strides of token, head
  std::array<int64_t, 3> k, v;  // strides of page, token, head
};

// q, k, v, o; lse and its strides; causal, window_left; sm_scale, logits_soft_cap, v_scale; alibi_slopes, sinks,
// custom_mask, mask_indptr, rope_cos_sin.
using RunTuple = std::tuple<Address, Address, Address, Address, Address, int64_t, int64_t, bool, int32_t, float, float,
                            float, Address, Address, Address, Address, Address>;

// Sets what the parameters of the CPU kernels and of the CUDA kernels call by the same names.
template <class Params>
void set_run(Params& p, const TensorLayout& layout, const RunTuple& run) {
  const auto& [q, k, v, o, lse, lse_token, lse_head, causal, window_left, sm_scale, logits_soft_cap, v_scale,
               alibi_slopes, sinks, custom_mask, mask_indptr, rope_cos_sin] = run;
  p.q = pointer<const void>(q);
  p.q_stride_token = layout.q[0];
  p.q_stride_head = layout.q[1];
  p.k = pointer<const void>(k);
  p.k_stride_page = layout.k[0];
  p.k_stride_head = layout.k[2];
  p.v = pointer<const void>(v);
  p.v_stride_page = layout.v[0];
  p.v_stride_head = layout.v[2];
  p.o = pointer<void>(o);
  p.o_stride_token = layout.o[0];
  p.o_stride_head = layout.o[1];
  p.lse = pointer<float>(lse);
  p.lse_stride_token = lse_token;
  p.lse_stride_head = lse_head;
  p.causal = causal;
  p.window_left = window_left;
  p.sm_scale = sm_scale;
  p.logits_soft_cap = logits_soft_cap;
  p.v_scale = v_scale;
  p.alibi_slopes = pointer<const float>(alibi_slopes);
  p.sinks = pointer<const float>(sinks);
  p.custom_mask = pointer<const uint8_t>(custom_mask);
  p.mask_indptr = pointer<const int64_t>(mask_indptr);
  p.rope_cos_sin = pointer<const float>(rope_cos_sin);
}

}  // namespace flashinfer_core
