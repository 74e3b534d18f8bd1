// Scores of one block of keys, their masks, and the online softmax (Milakov and Gimelshein, 2018), in registers.
#pragma once

#include "device/attention/config.cuh"

namespace flashinfer_core::cuda {

// What of an item does not change from block to block, for the rows of one warp. A lane owns rows gr and gr + 8 of each
// fragment of 16 rows: its row i stands at fragment i / 2, half i % 2.
class RowRules {
 public:
  static constexpr int kRows = 2 * kRowFragments;

  __device__ RowRules(const AttentionParams& p, const Item& item, int warp_row)
      : p_(p), item_(item), first_(item.row_begin + warp_row) {
    // Rows past the request do not count.
    last_ = min_of(first_ + FIC_ROWS_PER_WARP, item.request.q_len * p.group) - 1;
    end_of_all_ = end(first_), end_of_any_ = last_ < first_ ? item.key_begin : end(last_);
  }

  // Whether a block of keys is hidden from every row of the warp, or partly hidden from some.
  __device__ bool skips(int key) const {
    return key >= end_of_any_ || (p_.window_left >= 0 && key + kBlockKeys <= begin(first_));
  }
  __device__ bool masks(int key) const {
    return kMask || key + kBlockKeys > end_of_all_ || key < begin(max_of(first_, last_));
  }

  // The first key that a packed row sees, and the one after the last. In the kernel for SM90, whose warps have one
  // fragment of rows, blocks may begin before the item's first key.
  __device__ int begin(int row) const {
    const int first = kRowFragments == 1 ? item_.key_begin : 0;
    return p_.window_left < 0 ? first : max_of(first, position(row) - p_.window_left);
  }
  __device__ int end(int row) const { return p_.causal ? min_of(item_.key_end, position(row) + 1) : item_.key_end; }
  __device__ int position(int row) const { return token_of(p_, row) + item_.request.kv_len - item_.request.q_len; }

  __device__ bool visible_in_mask(int row, int key) const {
    const int64_t bit = static_cast<int64_t>(token_of(p_, row)) * item_.request.kv_len + key;
    const int64_t byte = p_.mask_indptr[item_.request_index] + (bit >> 3);
    return byte < p_.mask_bytes && (p_.custom_mask[byte] >> (bit & 7) & 1) != 0;
  }

 private:
  const AttentionParams& p_;
  const Item& item_;
  const int first_;  // packed rows of the warp
  int last_, end_of_all_, end_of_any_;
};

// The scores of a warp's rows with a block of keys; s[m][n] is the fragment of row fragment m and key tile n.
using Scores = float[kRowFragments][kKeyTiles][4];

// Brings products q k to the logits in base 2, for kernels with soft cap or ALiBi.
template <int Tiles>
__device__ inline void transform(const AttentionParams& p, const RowRules& rules, int first_row, int kv_head, int key,
                                 float scale, float (&s)[kRowFragments][Tiles][4]) {
  const int gr = lane_id() / 4, tq = lane_id() % 4;
#pragma unroll
  for (int i = 0; i < RowRules::kRows; ++i) {
    const int row = first_row + i / 2 * 16 + i % 2 * 8 + gr;
    float slope = 0.0f;
    int position = 0;
    if constexpr (kAlibi) {
      slope = p.alibi_slopes[kv_head * p.group + row - token_of(p, row) * p.group];
      position = rules.position(row);
    }
#pragma unroll
    for (int n = 0; n < Tiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& x = s[i / 2][n][i % 2 * 2 + j];
        x *= scale;
        if constexpr (kSoftCap) x = p.logits_soft_cap * tanh_accurate(x / p.logits_soft_cap);
        if constexpr (kAlibi) x += slope * static_cast<float>(key + n * 8 + tq * 2 + j - position);
        x *= kLog2E;
      }
    }
  }
}

// Sets the scores of keys that a row does not see to -infinity.
template <int Tiles>
__device__ inline void hide(const RowRules& rules, int first_row, int key, float (&s)[kRowFragments][Tiles][4]) {
  first_row = opaque(first_row);
  const int gr = lane_id() / 4, tq = lane_id() % 4;
#pragma unroll
  for (int i = 0; i < RowRules::kRows; ++i) {
    const int row = first_row + i / 2 * 16 + i % 2 * 8 + gr, lane_key = key + tq * 2;
    const int begin = rules.begin(row) - lane_key, end = rules.end(row) - lane_key;  // beside constants
#pragma unroll
    for (int n = 0; n < Tiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int at = n * 8 + j;
        bool visible = at >= begin && at < end;
        if constexpr (kMask) visible = visible && rules.visible_in_mask(row, lane_key + at);
        if (!visible) s[i / 2][n][i % 2 * 2 + j] = -kInfinity;
      }
    }
  }
}

// Multiplies a row of an output, or all rows, by a factor each.
template <int Columns>
__device__ inline void rescale(int i, float factor, float (&o)[kRowFragments][Columns][4]) {
#pragma unroll
  for (int n = 0; n < Columns; ++n) {
    o[i / 2][n][i % 2 * 2] *= factor;
    o[i / 2][n][i % 2 * 2 + 1] *= factor;
  }
}
template <int Columns>
__device__ inline void rescale(const float (&factor)[RowRules::kRows], float (&o)[kRowFragments][Columns][4]) {
#pragma unroll
  for (int i = 0; i < RowRules::kRows; ++i) rescale(i, factor[i], o);
}

// Running maximum and sum of a warp's rows. `scale` turns the scores into base-2 logits.
struct RowState {
  float top[RowRules::kRows];  // of the scores
  float sum[RowRules::kRows];  // of the weights that this lane has seen

  __device__ RowState() {
#pragma unroll
    for (int i = 0; i < RowRules::kRows; ++i) top[i] = -kInfinity, sum[i] = 0.0f;
  }

  // The sum of a row over the lanes that share it, and the base-2 logit that it is relative to.
  __device__ float total(int i) const {
    float x = sum[i];
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    x += __shfl_xor_sync(0xffffffffu, x, 2);
    return x;
  }
  __device__ float logit(int i, float scale) const { return top[i] == -kInfinity ? top[i] : top[i] * scale; }

  // Takes the scores of a block into the maxima, and brings the sums to them. Returns whether a maximum of the warp has
  // changed, which is rare in a long context; then `outdated(i, factor)` is called for each row i, whose output has to
  // be multiplied by the factor.
  template <int Tiles, class Outdated>
  __device__ bool raise(const float (&s)[kRowFragments][Tiles][4], float scale, Outdated outdated) {
    float before[RowRules::kRows];
    bool changed = false;
#pragma unroll
    for (int i = 0; i < RowRules::kRows; ++i) {
      float x = top[i], y = top[i];
#pragma unroll
      for (int n = 0; n < Tiles; ++n) {
        x = fmaxf(x, s[i / 2][n][i % 2 * 2]);
        y = fmaxf(y, s[i / 2][n][i % 2 * 2 + 1]);
      }
      x = fmaxf(x, y);
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
      before[i] = top[i];
      changed |= x != top[i];
      top[i] = x;
    }
    changed = __any_sync(0xffffffffu, changed);
    if (changed) {
#pragma unroll
      for (int i = 0; i < RowRules::kRows; ++i) {
        // The maximum is -infinity while a row has seen no key; there is nothing to rescale then.
        const float factor = before[i] == -kInfinity ? 0.0f : exp2_fast((before[i] - top[i]) * scale);
        sum[i] *= factor;
        outdated(i, factor);
      }
    }
    return changed;
  }

  // Turns scores into weights relative to the maxima.
  template <int Tiles>
  __device__ void weigh(float (&s)[kRowFragments][Tiles][4], float scale) {
#pragma unroll
    for (int i = 0; i < RowRules::kRows; ++i) {
      const float offset = top[i] == -kInfinity ? 0.0f : top[i] * scale;
      constexpr bool kTwoChains = kRowFragments == 1;  // of additions, where a warp has few rows side by side
      float odd = 0.0f;
#pragma unroll
      for (int n = 0; n < Tiles; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& x = s[i / 2][n][i % 2 * 2 + j];
          x = exp2_fast(fmaf(x, scale, -offset));
          (kTwoChains && j == 1 ? odd : sum[i]) += x;
        }
      }
      if constexpr (kTwoChains) sum[i] += odd;
    }
  }

  // Turns scores into weights relative to the new maxima, and brings output and sums to them.
  template <int Columns>
  __device__ void update(Scores& s, float scale, float (&o)[kRowFragments][Columns][4]) {
    raise(s, scale, [&](int i, float factor) { rescale(i, factor, o); });
    weigh(s, scale);
  }
};

}  // namespace flashinfer_core::cuda
