// The two small matrix products of attention on the CPU, and the packed layouts that they read.
//
// Both products have the form C[m, n] = sum over k of A[m, k] * B[k, n], with A read one broadcast word at a time and B
// a vector of words at a time. A word is 4 bytes: one float, or two bf16 of neighbouring k for the CPUs whose
// dot-product instruction multiplies pairs and sums in float32. The block of C held in registers is kRows x kVecs
// vectors: 6 x 4 fills 24 of AVX-512's 32 registers (6 x 2 of AVX2's 16) and needs 10 loads for 24 multiply-adds, so
// the multiply-add units, not the load ports, bound it.
#pragma once

#include "cpu/vec.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace flashinfer_core::FIC_ISA {

constexpr int kRows = 6;
constexpr int kVecs = W == 16 ? 4 : 2;

struct Float32Math {
  static constexpr int kPerWord = 1;
  static FIC_INLINE VecF broadcast(const float* word) { return splat(*word); }
  static FIC_INLINE VecF madd(VecF acc, VecF a, VecF b) { return acc + a * b; }

  // W words of a row of values from word w on. `left` values are there; those past them read as zero. With Full at
  // least W words are there, and no branch is spent on asking.
  template <bool Full, class T>
  static FIC_INLINE VecF load_words(const T* row, int w, int left) {
    return Full || left >= W ? load(row + w) : load_n(row + w, left);
  }

  // Values [d, d + W) of one key.
  template <bool Full, class T>
  static FIC_INLINE void load_values(const T* const* rows, int key, int, int d, int left, VecF* to) {
    to[0] = load_words<Full>(rows[key], d, left);
  }

  static void natural_order(float*, int) {}
};

#if defined(__AVX512BF16__)
struct Bf16Math {
  static constexpr int kPerWord = 2;
  static FIC_INLINE VecF broadcast(const float* word) {
    int32_t bits;
    memcpy(&bits, word, 4);
    return reinterpret_cast<VecF>(_mm512_set1_epi32(bits));
  }
  static FIC_INLINE VecF madd(VecF acc, VecF a, VecF b) {
    return reinterpret_cast<VecF>(
        _mm512_dpbf16_ps(reinterpret_cast<__m512>(acc), reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)));
  }

  template <bool Full>
  static FIC_INLINE VecF load_words(const bf16* row, int w, int left) {
    VecF v = {};
    if (Full || left >= 2 * W) {
      memcpy(&v, row + 2 * w, sizeof v);
    } else {
      memcpy(&v, row + 2 * w, static_cast<size_t>(left) * 2);
    }
    return v;
  }

  // Values [d, d + 2 W) of keys `key` and `key + 1`, paired. The interleaving instructions work in 128-bit lanes, so
  // the columns come out in a fixed order of their own, which natural_order() undoes once, in the output. An odd last
  // key is paired with zeros.
  template <bool Full>
  static FIC_INLINE void load_values(const bf16* const* rows, int key, int keys, int d, int left, VecF* to) {
    const auto a = reinterpret_cast<__m512i>(load_words<Full>(rows[key], d / 2, left));
    const auto b = key + 1 < keys ? reinterpret_cast<__m512i>(load_words<Full>(rows[key + 1], d / 2, left)) : __m512i{};
    to[0] = reinterpret_cast<VecF>(_mm512_unpacklo_epi16(a, b));
    to[1] = reinterpret_cast<VecF>(_mm512_unpackhi_epi16(a, b));
  }

  static void natural_order(float* row, int columns) {
    for (int d = 0; d < columns; d += 2 * W) {
      float lanes[2 * W];
      memcpy(lanes, row + d, sizeof lanes);
      for (int i = 0; i < 2 * W; ++i) row[d + i] = lanes[(i & 4) * 4 + i / 8 * 4 + i % 4];
    }
  }
};
#endif

// C = A B when scale is null, else C[m, :] = C[m, :] * scale[m] + A B.
template <class Math, int M, int N>
FIC_INLINE void gemm_block(const float* a, int lda, const float* b, int ldb, int depth, float* c, int ldc,
                           const float* scale) {
  VecF acc[M][N] = {};
  for (int k = 0; k < depth; ++k) {
    VecF vb[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) vb[n] = load(b + static_cast<int64_t>(k) * ldb + n * W);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        acc[m][n] = Math::madd(acc[m][n], Math::broadcast(a + static_cast<int64_t>(m) * lda + k), vb[n]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      float* out = c + static_cast<int64_t>(m) * ldc + n * W;
      store(out, scale == nullptr ? acc[m][n] : load(out) * scale[m] + acc[m][n]);
    }
  }
}

template <int N>
struct Const {
  static constexpr int value = N;
};

// Calls f with a number of rows from 1 to kRows as a compile-time constant.
template <class F>
FIC_INLINE void with_rows(int rows, const F& f) {
  switch (rows) {
    case 1:
      return f(Const<1>{});
    case 2:
      return f(Const<2>{});
    case 3:
      return f(Const<3>{});
    case 4:
      return f(Const<4>{});
    case 5:
      return f(Const<5>{});
    default:
      return f(Const<6>{});
  }
}

template <class Math, int N>
void gemm_columns(const float* a, int lda, const float* b, int ldb, int rows, int depth, float* c, int ldc,
                  const float* scale) {
  for (int m = 0; m < rows; m += kRows) {
    with_rows(min_of(rows - m, kRows), [&](auto block) {
      gemm_block<Math, block.value, N>(a + static_cast<int64_t>(m) * lda, lda, b, ldb, depth,
                                       c + static_cast<int64_t>(m) * ldc, ldc, scale == nullptr ? nullptr : scale + m);
    });
  }
}

// `columns` is a multiple of W. Depth counts words. Each element of C sums over k in order, whatever the other rows and
// columns of the call: a row's result does not depend on the rows beside it.
template <class Math>
void gemm(const float* a, int lda, const float* b, int ldb, int rows, int columns, int depth, float* c, int ldc,
          const float* scale) {
  int n = 0;
  for (; n + kVecs * W <= columns; n += kVecs * W)
    gemm_columns<Math, kVecs>(a, lda, b + n, ldb, rows, depth, c + n, ldc, scale);
  if (kVecs == 4 && n + 2 * W <= columns) {
    gemm_columns<Math, 2>(a, lda, b + n, ldb, rows, depth, c + n, ldc, scale);
    n += 2 * W;
  }
  if (n + W <= columns) gemm_columns<Math, 1>(a, lda, b + n, ldb, rows, depth, c + n, ldc, scale);
}

// ---- packed layouts -------------------------------------------------------------------------------------------------

template <int S, int... Lane>
FIC_INLINE void exchange(VecF& a, VecF& b, std::integer_sequence<int, Lane...>) {
  // Lanes whose bit S is set in a trade places with lanes whose bit S is clear in b.
#if defined(__clang__)
  const VecF low = __builtin_shufflevector(a, b, ((Lane & S) ? W + Lane - S : Lane)...);
  const VecF high = __builtin_shufflevector(a, b, ((Lane & S) ? W + Lane : Lane + S)...);
#else
  const VecF low = __builtin_shuffle(a, b, VecI{((Lane & S) ? W + Lane - S : Lane)...});
  const VecF high = __builtin_shuffle(a, b, VecI{((Lane & S) ? W + Lane : Lane + S)...});
#endif
  a = low;
  b = high;
}

template <int S>
FIC_INLINE void transpose_step(VecF (&t)[W]) {
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) {
    if ((i & S) == 0) exchange<S>(t[i], t[i + S], std::make_integer_sequence<int, W>{});
  }
}

// A W x W block of words: t[i][j] becomes t[j][i].
FIC_INLINE void transpose(VecF (&t)[W]) {
  if constexpr (W > 8) transpose_step<8>(t);
  if constexpr (W > 4) transpose_step<4>(t);
  transpose_step<2>(t);
  transpose_step<1>(t);
}

// Words [w, w + W) of W keys to out[word][key].
template <class Math, bool Full, class T>
FIC_INLINE void pack_key_block(const T* const* rows, int keys, int w, int left, float* out, int ld) {
  VecF t[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) t[i] = i < keys ? Math::template load_words<Full>(rows[i], w, left) : VecF{};
  transpose(t);
  const int words = Full ? W : (left + Math::kPerWord - 1) / Math::kPerWord;
#pragma GCC unroll 16
  for (int i = 0; i < words; ++i) store(out + static_cast<int64_t>(i) * ld, t[i]);
}

// out[word][key] for `keys` rows; columns up to the next multiple of W are zero. Calls ahead(key, W) as it goes along.
template <class Math, class T, class Ahead>
void pack_keys(const T* const* rows, int keys, int dim, float* out, int ld, const Ahead& ahead) {
  for (int key = 0; key < keys; key += W) {
    ahead(key, W);
    int w = 0;
    for (; (w + W) * Math::kPerWord <= dim; w += W) {
      pack_key_block<Math, true>(rows + key, keys - key, w, 0, out + static_cast<int64_t>(w) * ld + key, ld);
    }
    const int left = dim - w * Math::kPerWord;
    if (left > 0) {
      pack_key_block<Math, false>(rows + key, keys - key, w, left, out + static_cast<int64_t>(w) * ld + key, ld);
    }
  }
}

// out[key word][column], `ld` columns in the order of Math::load_values; zero past dim.
template <class Math, class T>
void pack_values(const T* const* rows, int keys, int dim, float* out, int ld) {
  constexpr int kStep = Math::kPerWord * W;
  for (int key = 0; key < keys; key += Math::kPerWord) {
    float* to = out + static_cast<int64_t>(key / Math::kPerWord) * ld;
    VecF values[Math::kPerWord];
    int d = 0;
    for (; d + kStep <= dim; d += kStep) {
      Math::template load_values<true>(rows, key, keys, d, 0, values);
      for (int i = 0; i < Math::kPerWord; ++i) store(to + d + i * W, values[i]);
    }
    if (d < dim) {
      Math::template load_values<false>(rows, key, keys, d, dim - d, values);
      for (int i = 0; i < Math::kPerWord; ++i) store(to + d + i * W, values[i]);
    }
  }
}

}  // namespace flashinfer_core::FIC_ISA
