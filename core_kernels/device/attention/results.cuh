// Where the results of a tile's rows go, and how those of the chunks of its keys become one.
#pragma once

#include "device/attention/config.cuh"

namespace flashinfer_core::cuda {

constexpr int kQuads = (kDimVo + 3) / 4;  // of output columns
constexpr int kOutBytes = FIC_O_DTYPE == 0 ? 4 : 2;
using OutMath = MathOf<FIC_O_DTYPE == 0 ? 1 : FIC_O_DTYPE>::Type;  // of 16-bit outputs

// Some words that one instruction stores.
template <int Count>
struct alignas(4 * Count) Words {
  uint32_t x[Count];
};

// A row of a tile, and where its results go: to the caller's tensors, or to the partial states of the item's chunk.
class ResultRow {
 public:
  __device__ ResultRow(const AttentionParams& p, const Item& item, int row, bool partial)
      : p_(p), item_(item), row_(row), partial_(partial) {
    const int packed = item.row_begin + row, in_request = token_of(p, packed);
    token_ = item.request.q_begin + in_request;
    head_ = item.kv_head * p.group + packed - in_request * p.group;
    exists_ = in_request < item.request.q_len && token_ < p.q_tokens;
    o_ = partial ? reinterpret_cast<char*>(partial_o(item.chunk))
                 : static_cast<char*>(p.o) + (token_ * p.o_stride_token + head_ * p.o_stride_head) * kOutBytes;
  }

  __device__ bool exists() const { return exists_; }

  // Turns the sum of the row's weights and the base-2 logit they are relative to into the factor of its output, and
  // stores its log-sum-exp. A sink counts once, with the first chunk. A row without a visible key gets 0 and -infinity;
  // NaN stays NaN.
  __device__ float close(float top, float sum, bool store_lse) const {
    float rescale = p_.v_scale * (p_.v_scale_ptr == nullptr ? 1.0f : *p_.v_scale_ptr);
    if (p_.sinks != nullptr && item_.chunk == 0) {
      const float sink = p_.sinks[head_] * kLog2E, most = fmaxf(top, sink);
      const float weight = top == -kInfinity ? 0.0f : exp2_fast(top - most);
      sum = sum * weight + (sink == -kInfinity ? 0.0f : exp2_fast(sink - most));
      rescale *= weight;
      top = most;
    }
    if (store_lse) this->store_lse(top, sum);
    return sum > 0.0f ? rescale * reciprocal(sum) : sum * 0.0f;
  }

  __device__ void store_lse(float top, float sum) const {
    const float lse = sum > 0.0f ? top + log2_fast(sum) : sum == 0.0f ? -kInfinity : sum;
    if (partial_) {
      *partial_lse(item_.chunk) = lse;
    } else if (p_.lse != nullptr) {
      p_.lse[token_ * p_.lse_stride_token + head_ * p_.lse_stride_head] = lse;
    }
  }

  // Stores `Count` columns from an even one on; those past the last are left out.
  template <int Count>
  __device__ void store(int column, const float (&x)[Count]) const {
    constexpr bool kWhole = kDimVo % 16 == 0;  // no column is left out, and rows begin at multiples of 16
    if (partial_) {
      store_as<kWhole>(reinterpret_cast<float*>(o_) + column, column, x);
      return;
    }
#if FIC_O_DTYPE == 0
    store_as<kWhole && !kDirect>(reinterpret_cast<float*>(o_) + column, column, x);
#else
    uint32_t packed[Count / 2];
#pragma unroll
    for (int i = 0; i < Count / 2; ++i) packed[i] = OutMath::pack(x[2 * i], x[2 * i + 1]);
    uint16_t* at = reinterpret_cast<uint16_t*>(o_) + column;
    if constexpr (kWhole && !kDirect) {
      *reinterpret_cast<Words<Count / 2>*>(at) = *reinterpret_cast<const Words<Count / 2>*>(packed);
    } else {
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        if (column + i < kDimVo) at[i] = static_cast<uint16_t>(packed[i / 2] >> i % 2 * 16 & 0xffff);
      }
    }
#endif
  }

  // Stores eight columns from a multiple of eight on, as the words of a 16-bit output, not of a partial state.
  __device__ void store_words(int column, const uint32_t (&words)[4]) const {
    *reinterpret_cast<Words<4>*>(o_ + column * 2) = *reinterpret_cast<const Words<4>*>(words);
  }

  // The partial state of the row that a chunk of its tile left.
  __device__ float* partial_o(int chunk) const { return p_.partial_o + slot_row(chunk) * kDimVo; }
  __device__ float* partial_lse(int chunk) const { return p_.partial_lse + slot_row(chunk); }

 private:
  __device__ int64_t slot_row(int chunk) const { return static_cast<int64_t>(item_.slot + chunk) * kTileRows + row_; }
  template <bool Aligned, int Count>
  static __device__ void store_as(float* at, int column, const float (&x)[Count]) {
    if constexpr (Aligned) {
      *reinterpret_cast<Words<Count>*>(at) = *reinterpret_cast<const Words<Count>*>(x);
    } else {
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        if (column + i < kDimVo) at[i] = x[i];
      }
    }
  }

  const AttentionParams& p_;
  const Item& item_;
  const int row_;
  const bool partial_;
  bool exists_;
  int head_;
  int64_t token_;
  char* o_;
};

// Four floats of a partial output from a column on, zeros past its end.
__device__ inline void load_quad(const float* row, int column, bool valid, float (&x)[4]) {
  if constexpr (kDimVo % 4 == 0) {
    const float4 quad = valid ? __ldcg(reinterpret_cast<const float4*>(row + column)) : make_float4(0, 0, 0, 0);
    x[0] = quad.x, x[1] = quad.y, x[2] = quad.z, x[3] = quad.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = valid && column + i < kDimVo ? __ldcg(row + column + i) : 0.0f;
  }
}

// Merges rows [row_begin, row_end) of the partial states of a tile's chunks, in order, and writes them. Other CTAs
// wrote them, so reads go past L1. Their latency is what counts: a thread has kBatch chunks under way.
template <int Threads>
__device__ inline void merge_rows(const AttentionParams& p, const Item& item, int row_begin, int row_end) {
  const int n = item.num_chunks;
  constexpr int kBatch = 8;
  for (int index = row_begin * kQuads + threadIdx.x; index < row_end * kQuads; index += Threads) {
    const int column = index % kQuads * 4;
    const ResultRow row(p, item, index / kQuads, false);
    if (!row.exists()) continue;
    float top = -kInfinity, sum = 0.0f, x[4] = {};
    for (int first = 0; first < n; first += kBatch) {
      float lse[kBatch], part[kBatch][4], most = top;
#pragma unroll
      for (int c = 0; c < kBatch; ++c) {
        lse[c] = first + c < n ? __ldcg(row.partial_lse(first + c)) : -kInfinity;
        load_quad(row.partial_o(first + c), column, first + c < n, part[c]);
      }
#pragma unroll
      for (int c = 0; c < kBatch; ++c) most = fmaxf(most, lse[c]);
      const float rescale = top == -kInfinity ? 0.0f : exp2_fast(top - most);
      sum *= rescale;
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] *= rescale;
#pragma unroll
      for (int c = 0; c < kBatch; ++c) {
        const float weight = lse[c] == -kInfinity ? 0.0f : exp2_fast(lse[c] - most);
        sum += weight;
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] += weight * part[c][i];
      }
      top = most;
    }
    const float factor = sum > 0.0f ? reciprocal(sum) : sum * 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] *= factor;
    row.store(column, x);
    if (column == 0) row.store_lse(top, sum);
  }
}

}  // namespace flashinfer_core::cuda
