// Attention on the CPU: paged or ragged KV, decode, prefill and append in one kernel.
//
// A work item is up to 128 packed rows (token x head of the GQA group) of one KV head against a range of keys. Keys are
// walked in tiles of 256, whose rows are found through the page table:
//     S = Q K^T    scale, soft cap, ALiBi, masks    running maximum and P = 2^(S - max)    O = O * 2^(old - new) + P V
// as in FlashAttention (Dao et al. 2022), in base 2. Scores, sums and outputs are float32; where the CPU has bf16 dot
// products and both Q and KV are bf16, the products take bf16 inputs (P included) and sum in float32. Many rows read
// packed copies of the tile (gemm.h), few rows the cache itself (few_rows.h).
//
// Roofline, per key and KV head of D = head_dim: 2 D values are read, 4 D R operations done for the R rows of an item.
// Decode has R = group: at bf16, D = 128 and R = 4 that is 512 bytes for 2048 operations; from memory (14 GB/s a core
// where this was measured) the bytes bound it, from a cache the arithmetic. Prefill has R = 128: arithmetic bounds it,
// at one 512-bit multiply-add a cycle (117 GFLOP/s a core in float32, 230 in bf16 there); it reaches 0.8 of that.
//
// What was tried, on a Zen 4 core:
//   - key tiles of 128 and 192: 5 to 10 % slower in prefill, for the work that softmax does once a row and tile;
//   - row tiles of 64: prefill 15 % slower, for the copies;
//   - items in order of cost alone, which alternates between heads: long prefill 15 % slower, for reading each head's
//     keys from memory again (see planner.cpp);
//   - packing for few rows: decode 1.5 to 2 times slower;
//   - asking for rows of K ahead of their use: decode from the caches 10 % faster, from memory 15 % slower; and from
//     memory is how a model with many layers reads its keys;
//   - not asking for V beside K: decode from memory 10 % slower.

#include <cstdlib>

#include "cpu/few_rows.h"
#include "cpu/gemm.h"
#include "cpu/parallel.h"
#include "cpu/params.h"

namespace flashinfer_core::FIC_ISA {
namespace {

constexpr int kKeyTile = 256;  // scores of 128 rows take 128 KiB of the second-level cache
constexpr float kInfinity = __builtin_inff();
constexpr float kLog2e = 1.44269504088896341f;

constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }

FIC_INLINE float exp2_of(float x) { return exp2(splat(x))[0]; }

// Reused by every item that a thread works on; grows to the largest one.
float* thread_scratch(size_t floats) {
  thread_local float* buffer = nullptr;
  thread_local size_t capacity = 0;
  if (capacity < floats) {
    free(buffer);
    capacity = (floats + 1023) / 1024 * 1024;
    buffer = static_cast<float*>(aligned_alloc(64, capacity * sizeof(float)));
    if (buffer == nullptr) abort();
  }
  return buffer;
}

// Calls f with the pointer as one of its element type.
template <class Void, class F>
FIC_INLINE void with_type(DType dtype, Void* pointer, const F& f) {
  if constexpr (__is_same(Void, const void)) {
    if (dtype == DType::f32)
      f(static_cast<const float*>(pointer));
    else if (dtype == DType::f16)
      f(static_cast<const f16*>(pointer));
    else
      f(static_cast<const bf16*>(pointer));
  } else {
    if (dtype == DType::f32)
      f(static_cast<float*>(pointer));
    else if (dtype == DType::f16)
      f(static_cast<f16*>(pointer));
    else
      f(static_cast<bf16*>(pointer));
  }
}

template <class T>
FIC_INLINE void read_row(const T* from, int dim, float* to) {
  int d = 0;
  for (; d + W <= dim; d += W) store(to + d, load(from + d));
  for (; d < dim; ++d) to[d] = to_float(from[d]);
}

template <class T>
FIC_INLINE void write_scaled(const float* from, float scale, int dim, T* to) {
  int d = 0;
  for (; d + W <= dim; d += W) store(to + d, load(from + d) * scale);
  for (; d < dim; ++d) to[d] = from_float<T>(from[d] * scale);
}

// Rotates the two halves of a row by its position's angles (Llama's half-split RoPE). Queries that outnumber their keys
// begin at negative positions.
FIC_INLINE void rotate(float* row, int dim, const float* table, int64_t position) {
  const float* cosines = table + (position < 0 ? -position : position) * dim;
  const float sign = position < 0 ? -1.0f : 1.0f;
  const int half = dim / 2;
  for (int d = 0; d < half; ++d) {
    const float x = row[d], y = row[d + half], sine = sign * cosines[d + half];
    row[d] = x * cosines[d] - y * sine;
    row[d + half] = y * cosines[d] + x * sine;
  }
}

struct Row {
  int64_t token;     // row of q, o and lse
  int32_t head;      // query head
  int64_t position;  // of the query among the request's keys; negative when there are more queries than keys
};

Row row_of(const AttentionParams& p, const WorkItem& item, int row) {
  const int32_t index = item.row_begin + row;
  const int32_t begin = p.qo_indptr[item.request];
  const int32_t in_request = index / p.group;
  const int64_t offset = static_cast<int64_t>(p.kv_lens[item.request]) - (p.qo_indptr[item.request + 1] - begin);
  return {begin + in_request, item.kv_head * p.group + index % p.group, in_request + offset};
}

// Keys [begin, end) that the masks which are ranges (causal, window) leave to a row, within the item's range.
FIC_INLINE void key_range(const AttentionParams& p, const WorkItem& item, const Row& row, int64_t* begin,
                          int64_t* end) {
  *begin = item.kv_begin;
  *end = item.kv_end;
  if (p.causal) *end = min_of(*end, row.position + 1);
  if (p.window_left >= 0) *begin = max_of(*begin, row.position - p.window_left);
}

// Pointers to the K and V rows of keys [key, key + n).
template <class T>
void gather_rows(const AttentionParams& p, const WorkItem& item, int64_t key, int n, const T** k_rows,
                 const T** v_rows) {
  const T* k = static_cast<const T*>(p.k) + item.kv_head * p.k_stride_head;
  const T* v = static_cast<const T*>(p.v) + item.kv_head * p.v_stride_head;
  const int64_t start = p.page_start[item.request];
  if (p.page_table == nullptr) {
    for (int i = 0; i < n; ++i) {
      k_rows[i] = k + (start + key + i) * p.k_stride_token;
      v_rows[i] = v + (start + key + i) * p.v_stride_token;
    }
    return;
  }
  const int32_t* table = p.page_table + start + key / p.page_size;
  int slot = static_cast<int>(key % p.page_size);
  for (int i = 0; i < n; ++table, slot = 0) {
    const T* k_page = k + *table * p.k_stride_page;
    const T* v_page = v + *table * p.v_stride_page;
    for (; i < n && slot < p.page_size; ++i, ++slot) {
      k_rows[i] = k_page + slot * p.k_stride_token;
      v_rows[i] = v_page + slot * p.v_stride_token;
    }
  }
}

FIC_INLINE void put_weight(float* weights, int j, VecF v, Float32Math) { store(weights + j, v); }
#if defined(__AVX512BF16__)
FIC_INLINE void put_weight(float* weights, int j, VecF v, Bf16Math) {
  const __m256bh h = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(v));
  memcpy(reinterpret_cast<bf16*>(weights) + j, &h, sizeof h);
}
#endif

// Turns the scores s[0, n) of a row into weights, in place, zero where masked. Returns the factor by which the row's
// sum and output so far shrink. In place is safe for bf16 too: weight j overwrites score j / 2, which has been read.
template <class Math>
float softmax_row(const AttentionParams& p, const WorkItem& item, const Row& row, int64_t key, int n, float* s,
                  float* row_max, float* row_sum) {
  int64_t from, to;
  key_range(p, item, row, &from, &to);
  const int lo = static_cast<int>(max_of<int64_t>(from - key, 0));
  const int hi = static_cast<int>(min_of<int64_t>(to - key, n));
  const int padded = round_up(n, W);
  if (lo >= hi) {
    for (int j = 0; j < padded; j += W) put_weight(s, j, VecF{}, Math{});
    return 1.0f;
  }
  const int first = lo / W * W, last = round_up(hi, W);

  // What is not a plain scaled score is rare, and worth a pass of its own.
  float scale = p.sm_scale * kLog2e;
  if (p.logits_soft_cap > 0.0f) {
    const float inner = p.sm_scale / p.logits_soft_cap;
    for (int j = first; j < last; j += W) store(s + j, p.logits_soft_cap * tanh(load(s + j) * inner));
    scale = kLog2e;
  }
  if (p.alibi_slopes != nullptr) {
    const float slope = p.alibi_slopes[row.head] * kLog2e;
    for (int j = first; j < last; ++j) s[j] = s[j] * scale + slope * static_cast<float>(key + j - row.position);
    scale = 1.0f;
  }
  const float masked = scale < 0.0f ? kInfinity : -kInfinity;  // -infinity once scaled
  if (scale == 0.0f) {
    for (int j = first; j < last; j += W) store(s + j, load(s + j) * scale);
    scale = 1.0f;
  }
  for (int j = first; j < lo; ++j) s[j] = masked;
  for (int j = hi; j < last; ++j) s[j] = masked;
  if (p.custom_mask != nullptr) {
    const int64_t query = row.token - p.qo_indptr[item.request];
    const int64_t bit = query * p.kv_lens[item.request] + key;
    const uint8_t* mask = p.custom_mask + p.mask_indptr[item.request];
    for (int j = lo; j < hi; ++j) {
      if (((mask[(bit + j) >> 3] >> ((bit + j) & 7)) & 1) == 0) s[j] = masked;
    }
  }

  VecF tile_max = splat(-kInfinity);
  for (int j = first; j < last; j += W) tile_max = max(load(s + j) * scale, tile_max);
  const float new_max = max_of(*row_max, max_element(tile_max));
  const float shift = new_max == -kInfinity ? 0.0f : new_max;
  VecF tile_sum = {};
  for (int j = 0; j < first; j += W) put_weight(s, j, VecF{}, Math{});
  for (int j = first; j < last; j += W) {
    const VecF weight = exp2_nonpositive(load(s + j) * scale - shift);
    tile_sum += weight;
    put_weight(s, j, weight, Math{});
  }
  for (int j = last; j < padded; j += W) put_weight(s, j, VecF{}, Math{});
  const float shrink = exp2_of(*row_max - shift);
  *row_max = new_max;
  *row_sum = *row_sum * shrink + sum(tile_sum);
  return shrink;
}

// Adds the sink, normalises a row and writes it.
void write_row(const AttentionParams& p, const Row& row, const float* acc, float row_max, float row_sum) {
  float factor = 1.0f;
  if (p.sinks != nullptr) {
    const float sink = p.sinks[row.head] * kLog2e;
    const float both = max_of(row_max, sink);
    if (both > -kInfinity) {
      factor = exp2_of(row_max - both);
      row_sum = row_sum * factor + exp2_of(sink - both);
      row_max = both;
    }
  }
  const float scale = row_sum == 0.0f ? 0.0f : p.v_scale * factor / row_sum;
  const int64_t at = row.token * p.o_stride_token + row.head * p.o_stride_head;
  with_type(p.o_dtype, p.o, [&](auto* o) { write_scaled(acc, scale, p.head_dim_vo, o + at); });
  if (p.lse != nullptr) {
    p.lse[row.token * p.lse_stride_token + row.head * p.lse_stride_head] =
        row_sum == 0.0f ? -kInfinity : row_max + __builtin_log2f(row_sum);
  }
}

// Writes one piece of a split; whoever writes the last piece merges all of them, in order, so that the result does not
// depend on which thread was faster.
void write_partial(const AttentionParams& p, const WorkItem& item, const Row* row, const float* acc, int ld,
                   const float* row_max, const float* row_sum) {
  const MergeGroup& merge = p.merges[item.merge];
  const int dim = p.head_dim_vo, stride = dim + 2;
  float* states = p.workspace + merge.first_float;
  float* own = states + static_cast<int64_t>(item.partial) * merge.num_rows * stride;
  for (int r = 0; r < merge.num_rows; ++r, own += stride) {
    own[0] = row_max[r];
    own[1] = row_sum[r];
    memcpy(own + 2, acc + static_cast<int64_t>(r) * ld, static_cast<size_t>(dim) * sizeof(float));
  }
  if (__atomic_sub_fetch(&p.merges_left[item.merge], 1, __ATOMIC_ACQ_REL) != 0) return;

  const int64_t piece_stride = static_cast<int64_t>(merge.num_rows) * stride;
  float merged[kMaxHeadDim];
  for (int r = 0; r < merge.num_rows; ++r) {
    const float* state = states + static_cast<int64_t>(r) * stride;
    float top = -kInfinity, total = 0.0f;
    for (int i = 0; i < merge.num_partials; ++i) top = max_of(state[i * piece_stride], top);
    const float shift = top == -kInfinity ? 0.0f : top;
    for (int d = 0; d < dim; ++d) merged[d] = 0.0f;
    for (int i = 0; i < merge.num_partials; ++i) {
      const float* piece = state + i * piece_stride;
      const float weight = exp2_of(piece[0] - shift);
      total += weight * piece[1];
      for (int d = 0; d < dim; ++d) merged[d] += weight * piece[2 + d];
    }
    write_row(p, row[r], merged, top, total);
  }
}

template <class Math, class T>
void run_item(const AttentionParams& p, const WorkItem& item) {
  const int rows = item.row_end - item.row_begin;
  const int words = (p.head_dim_qk + Math::kPerWord - 1) / Math::kPerWord;
  const int ld_q = round_up(words, W);
  const int ld_o = round_up(p.head_dim_vo, Math::kPerWord * W);
  const int value_words = kKeyTile / Math::kPerWord;
  const size_t floats = static_cast<size_t>(rows) * (ld_q + ld_o + kKeyTile) + words * kKeyTile + value_words * ld_o +
                        (p.rope_cos_sin == nullptr ? 0 : kKeyTile * p.head_dim_qk);
  float* k = thread_scratch(floats);
  float* v = k + words * kKeyTile;
  float* s = v + value_words * ld_o;
  float* o = s + rows * kKeyTile;
  float* q = o + rows * ld_o;
  float* rotated = q + rows * ld_q;

  Row row[kRowTile];
  float row_max[kRowTile], row_sum[kRowTile], shrink[kRowTile];
  for (int r = 0; r < rows; ++r) {
    row[r] = row_of(p, item, r);
    row_max[r] = -kInfinity;
    row_sum[r] = 0.0f;
    float value[kMaxHeadDim];
    const int64_t at = row[r].token * p.q_stride_token + row[r].head * p.q_stride_head;
    with_type(p.q_dtype, p.q, [&](const auto* from) { read_row(from + at, p.head_dim_qk, value); });
    if (p.rope_cos_sin != nullptr) rotate(value, p.head_dim_qk, p.rope_cos_sin, row[r].position);
    float* to = q + r * ld_q;
    memset(to, 0, static_cast<size_t>(ld_q) * sizeof(float));
    if constexpr (Math::kPerWord == 1)
      write_scaled(value, 1.0f, p.head_dim_qk, to);
    else
      write_scaled(value, 1.0f, p.head_dim_qk, reinterpret_cast<bf16*>(to));
  }
  memset(o, 0, static_cast<size_t>(rows) * ld_o * sizeof(float));

  int64_t begin, end, ignored;
  key_range(p, item, row[0], &begin, &ignored);
  key_range(p, item, row[rows - 1], &ignored, &end);
  const T* k_rows[kKeyTile];
  const T* v_rows[kKeyTile];
  for (int64_t key = begin; key < end; key += kKeyTile) {
    const int n = static_cast<int>(min_of<int64_t>(kKeyTile, end - key));
    gather_rows(p, item, key, n, k_rows, v_rows);
    const bool few = rows <= kFewRows;
    // A row of V often lies beside the row of K: asking for both at once reads memory in one stream. V then waits in
    // the second-level cache until the scores of the tile are known.
    const auto while_scoring = [&](int from, int count) {
      for (int j = from; j < min_of(from + count, n); ++j) prefetch(v_rows[j], p.head_dim_vo);
    };
    const auto score = [&](const auto* const* from) {
      if (few) {
        few_rows_scores<Math>(q, ld_q, from, rows, n, p.head_dim_qk, s, kKeyTile, while_scoring);
      } else {
        pack_keys<Math>(from, n, p.head_dim_qk, k, kKeyTile, while_scoring);
        gemm<Math>(q, ld_q, k, kKeyTile, rows, round_up(n, W), words, s, kKeyTile, nullptr);
      }
    };
    if (p.rope_cos_sin == nullptr) {
      score(k_rows);
    } else if constexpr (Math::kPerWord == 1) {
      const float* rotated_rows[kKeyTile];
      for (int j = 0; j < n; ++j) {
        float* row = rotated + j * p.head_dim_qk;
        read_row(k_rows[j], p.head_dim_qk, row);
        rotate(row, p.head_dim_qk, p.rope_cos_sin, key + j);
        rotated_rows[j] = row;
      }
      score(rotated_rows);
    }
    for (int r = 0; r < rows; ++r) {
      shrink[r] = softmax_row<Math>(p, item, row[r], key, n, s + r * kKeyTile, &row_max[r], &row_sum[r]);
    }
    if (few) {
      few_rows_output<Math>(s, kKeyTile, v_rows, rows, n, p.head_dim_vo, o, ld_o, shrink);
    } else {
      pack_values<Math>(v_rows, n, p.head_dim_vo, v, ld_o);
      gemm<Math>(s, kKeyTile, v, ld_o, rows, ld_o, (n + Math::kPerWord - 1) / Math::kPerWord, o, ld_o, shrink);
    }
  }
  for (int r = 0; r < rows; ++r) Math::natural_order(o + r * ld_o, ld_o);

  if (item.merge >= 0) {
    write_partial(p, item, row, o, ld_o, row_max, row_sum);
  } else {
    for (int r = 0; r < rows; ++r) write_row(p, row[r], o + static_cast<int64_t>(r) * ld_o, row_max[r], row_sum[r]);
  }
}

template <class Math, class T>
void run_items(const AttentionParams& p) {
  parallel_ranges(p.num_items, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) run_item<Math, T>(p, p.items[i]);
  });
}

}  // namespace

void attention(const AttentionParams& p) {
#if defined(__AVX512BF16__)
  // Rotated queries and keys stay in float32: rounding them again would cost accuracy.
  const bool rotated = p.rope_cos_sin != nullptr;
  if (p.q_dtype == DType::bf16 && p.kv_dtype == DType::bf16 && !rotated) return run_items<Bf16Math, bf16>(p);
#endif
  if (p.kv_dtype == DType::f32)
    run_items<Float32Math, float>(p);
  else if (p.kv_dtype == DType::f16)
    run_items<Float32Math, f16>(p);
  else
    run_items<Float32Math, bf16>(p);
}

}  // namespace flashinfer_core::FIC_ISA
