// Merges partial attention results over disjoint sets of keys (Dao et al. 2022; Hong et al. 2023):
//     s = log2 sum_i 2^s_i,   v = sum_i 2^(s_i - s) v_i
// in one pass over a token and head. States with s_i = -infinity (no visible key) are not read, so what lies in their v
// does not matter; if all are, the result is (0, -infinity).
//
// Roofline: reads num_states vectors of head_dim and writes one, with two operations a value: memory bounds it.
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/vec.h"

namespace flashinfer_core::FIC_ISA {
namespace {

template <class T>
FIC_INLINE StateView state_of(const MergeStatesParams& p, int i) {
  if (i == 0) return p.first;
  StateView state = p.second;
  state.v = static_cast<const T*>(state.v) + (i - 1) * p.v_stride_state;
  state.s += (i - 1) * p.s_stride_state;
  return state;
}

template <class T>
void merge_token(const MergeStatesParams& p, int64_t token) {
  constexpr float kInfinity = __builtin_inff();
  for (int head = 0; head < p.num_heads; ++head) {
    const auto s_of = [&](int i) {
      const StateView state = state_of<T>(p, i);
      return state.s[token * state.s_stride_token + head * state.s_stride_head];
    };
    float top = -kInfinity, total = 0.0f;
    for (int i = 0; i < p.num_states; ++i) {
      const float s = s_of(i);
      top = s > top || s != s ? s : top;
    }
    if (top != -kInfinity) {
      for (int i = 0; i < p.num_states; ++i) total += exp2(splat(s_of(i) - top))[0];
    }
    const float scale = top == -kInfinity ? 0.0f : 1.0f / total;
    T* out = static_cast<T*>(p.v_out) + token * p.v_out_stride_token + head * p.v_out_stride_head;
    for (int d = 0; d < p.head_dim; d += W) {
      const int left = p.head_dim - d;
      VecF acc = {};
      for (int i = 0; i < p.num_states; ++i) {
        const float s = s_of(i);
        if (s == -kInfinity) continue;
        const StateView state = state_of<T>(p, i);
        const T* v = static_cast<const T*>(state.v) + token * state.v_stride_token + head * state.v_stride_head + d;
        acc += (left >= W ? load(v) : load_n(v, left)) * exp2(splat(s - top));
      }
      if (left >= W)
        store(out + d, acc * scale);
      else
        store_n(out + d, acc * scale, left);
    }
    p.s_out[token * p.s_out_stride_token + head * p.s_out_stride_head] =
        top == -kInfinity ? -kInfinity : top + __builtin_log2f(total);
  }
}

template <class T>
void merge_tokens(const MergeStatesParams& p) {
  const int64_t bytes = static_cast<int64_t>(p.num_states + 1) * p.num_heads * p.head_dim * sizeof(T);
  parallel_ranges(p.num_tokens, rows_per_range(bytes), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      if (p.mask == nullptr || p.mask[token] != 0) merge_token<T>(p, token);
    }
  });
}

}  // namespace

void merge_states(const MergeStatesParams& p) {
  if (p.dtype == DType::f32)
    merge_tokens<float>(p);
  else if (p.dtype == DType::f16)
    merge_tokens<f16>(p);
  else
    merge_tokens<bf16>(p);
}

}  // namespace flashinfer_core::FIC_ISA
