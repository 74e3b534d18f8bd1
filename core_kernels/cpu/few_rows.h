// The two products of attention for few query rows (decode), read straight from the KV cache.
//
// Packing a tile of keys (gemm.h) costs two passes over it, which pay only when many rows use the result. With up to
// kFewRows rows it is cheaper to keep the key's own order: scores are dot products along the row, four keys at a time,
// whose lane sums are added in a tree (about three instructions a score); the output adds weight times row.
//
// A row's result does not depend on the rows beside it: each has accumulators of its own, filled in the order of keys.
#pragma once

#include "cpu/gemm.h"

namespace flashinfer_core::FIC_ISA {

constexpr int kFewRows = 8;

// Half of the lanes of a and half of b, added: lanes with bit S clear sum a over that bit, the others b.
template <int S>
FIC_INLINE VecF fold(VecF a, VecF b) {
  exchange<S>(a, b, std::make_integer_sequence<int, W>{});
  return a + b;
}

// The lane sums of W vectors, in two steps: four vectors fold into one, in which every fourth lane belongs to the same
// vector; W / 4 of those fold into one whose lane l is the sum of vector l.
FIC_INLINE VecF fold_four(const VecF (&t)[4]) { return fold<2>(fold<1>(t[0], t[1]), fold<1>(t[2], t[3])); }
FIC_INLINE VecF fold_groups(const VecF (&t)[W / 4]) {
  if constexpr (W == 16)
    return fold<8>(fold<4>(t[0], t[1]), fold<4>(t[2], t[3]));
  else if constexpr (W == 8)
    return fold<4>(t[0], t[1]);
  else
    return t[0];
}

// acc[m][i] += q[m] . k[i] over words [w, w + W).
template <class Math, int M, bool Full, class T>
FIC_INLINE void add_products(const float* q, int ldq, const T* const (&rows)[4], int w, int left, VecF (&acc)[M][4]) {
  VecF k[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) k[i] = Math::template load_words<Full>(rows[i], w, left);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const VecF row = load(q + m * ldq + w);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) acc[m][i] = Math::madd(acc[m][i], row, k[i]);
  }
}

// s[m][key] = q[m] . k[key] for M rows, with `keys` rounded up to W; columns past `keys` repeat the last key and must
// be masked. q is zero from `dim` to the next multiple of W words. Calls ahead(key, 4) before it reads four keys.
template <class Math, int M, class T, class Ahead>
void scores_block(const float* q, int ldq, const T* const* k_rows, int keys, int dim, float* s, int lds,
                  const Ahead& ahead) {
  const int full_words = dim / (W * Math::kPerWord) * W;
  const int left = dim - full_words * Math::kPerWord;
  for (int key = 0; key < keys; key += W) {
    VecF groups[M][W / 4];
    for (int g = 0; g < W / 4; ++g) {
      const T* rows[4];
      for (int i = 0; i < 4; ++i) rows[i] = k_rows[min_of(key + 4 * g + i, keys - 1)];
      ahead(key + 4 * g, 4);
      VecF acc[M][4] = {};
      for (int w = 0; w < full_words; w += W) add_products<Math, M, true>(q, ldq, rows, w, 0, acc);
      if (left > 0) add_products<Math, M, false>(q, ldq, rows, full_words, left, acc);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) groups[m][g] = fold_four(acc[m]);
    }
    for (int m = 0; m < M; ++m) store(s + m * lds + key, fold_groups(groups[m]));
  }
}

// o[m] = o[m] * shrink[m] + sum over keys of p[m][key] v[key], for M rows and N x W columns from d on.
template <class Math, int M, int N, bool Full, class T>
FIC_INLINE void output_block(const float* p, int ldp, const T* const* v_rows, int keys, int d, int left, float* o,
                             int ldo, const float* shrink) {
  VecF acc[M][N] = {};
  for (int key = 0; key < keys; key += Math::kPerWord) {
    VecF v[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n += Math::kPerWord) {
      Math::template load_values<Full>(v_rows, key, keys, d + n * W, left - n * W, v + n);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const VecF weight = Math::broadcast(p + m * ldp + key / Math::kPerWord);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[m][n] = Math::madd(acc[m][n], weight, v[n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      float* out = o + m * ldo + d + n * W;
      store(out, load(out) * shrink[m] + acc[m][n]);
    }
  }
}

template <class Math, int M, class T>
void output_rows(const float* p, int ldp, const T* const* v_rows, int keys, int dim, float* o, int ldo,
                 const float* shrink) {
  constexpr int kStep = Math::kPerWord;  // vectors of columns that come together
  int d = 0;
  for (; d + kVecs * W <= dim; d += kVecs * W)
    output_block<Math, M, kVecs, true>(p, ldp, v_rows, keys, d, 0, o, ldo, shrink);
  for (; d + kStep * W <= dim; d += kStep * W)
    output_block<Math, M, kStep, true>(p, ldp, v_rows, keys, d, 0, o, ldo, shrink);
  if (d < dim) output_block<Math, M, kStep, false>(p, ldp, v_rows, keys, d, dim - d, o, ldo, shrink);
}

// Calls f(first row, number of rows as a constant) for blocks of at most kRows rows; two blocks are about equal.
template <class F>
FIC_INLINE void row_blocks(int rows, const F& f) {
  for (int m = 0; m < rows;) {
    const int block = rows - m > kRows ? (rows - m + 1) / 2 : rows - m;
    with_rows(block, [&](auto count) { f(m, count); });
    m += block;
  }
}

template <class Math, class T, class Ahead>
void few_rows_scores(const float* q, int ldq, const T* const* k_rows, int rows, int keys, int dim, float* s, int lds,
                     const Ahead& ahead) {
  row_blocks(rows, [&](int m, auto count) {
    scores_block<Math, count.value>(q + m * ldq, ldq, k_rows, keys, dim, s + m * lds, lds, ahead);
  });
}

template <class Math, class T>
void few_rows_output(const float* p, int ldp, const T* const* v_rows, int rows, int keys, int dim, float* o, int ldo,
                     const float* shrink) {
  row_blocks(rows, [&](int m, auto count) {
    output_rows<Math, count.value>(p + m * ldp, ldp, v_rows, keys, dim, o + m * ldo, ldo, shrink + m);
  });
}

}  // namespace flashinfer_core::FIC_ISA
