// RMSNorm and layer norm over rows, with or without a residual that is added first.
//
// One thread takes whole rows. A row is read twice (three times for layer norm): sums first, then the scaled output.
// The second reading hits the L1 cache, so no scratch row is needed and the length of a row has no limit. With a
// residual the sum in + residual is formed again in the second reading, from values that the first has left untouched:
// the norm sees it in float32, before the rounding that the residual gets.
//
// Roofline: a row of n elements moves 2n elements (4n with a residual) and costs about 4n operations. Memory bounds it.
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/vec.h"

namespace flashinfer_core::FIC_ISA {
namespace {

template <class T>
struct Row {
  const T* in;
  T* out;
  T* residual;
};

// in (+ residual) of the `n` elements from i on; elements past them are 0.
template <bool kAdd, class T>
FIC_INLINE VecF load_sum(const Row<T>& row, int64_t i, int n) {
  if (n == W) return kAdd ? load(row.in + i) + load(row.residual + i) : load(row.in + i);
  return kAdd ? load_n(row.in + i, n) + load_n(row.residual + i, n) : load_n(row.in + i, n);
}

// The sum over the row of f(elements, how many of them count). Four sums at a time hide the latency of the addition.
template <bool kAdd, class T, class F>
FIC_INLINE float sum_over(const Row<T>& row, int64_t dim, const F& f) {
  VecF s0{}, s1{}, s2{}, s3{};
  int64_t i = 0;
  for (; i + 4 * W <= dim; i += 4 * W) {
    s0 += f(load_sum<kAdd>(row, i, W), W);
    s1 += f(load_sum<kAdd>(row, i + W, W), W);
    s2 += f(load_sum<kAdd>(row, i + 2 * W, W), W);
    s3 += f(load_sum<kAdd>(row, i + 3 * W, W), W);
  }
  for (; i + W <= dim; i += W) s0 += f(load_sum<kAdd>(row, i, W), W);
  if (i < dim) s1 += f(load_sum<kAdd>(row, i, static_cast<int>(dim - i)), static_cast<int>(dim - i));
  return sum((s0 + s1) + (s2 + s3));
}

FIC_INLINE VecF first_n(VecF v, int n) {
  float lanes[W];
  memcpy(lanes, &v, sizeof lanes);
  for (int i = 0; i < W; ++i) lanes[i] = i < n ? lanes[i] : 0.0f;
  return load(lanes);
}

template <class T, class WT, bool kLayer, bool kAdd>
void norm_row(const NormParams& p, const Row<T>& row) {
  const int64_t dim = p.dim;
  const float inverse_dim = 1.0f / static_cast<float>(dim);
  float mean = 0.0f;
  if (kLayer) mean = sum_over<kAdd>(row, dim, [](VecF x, int) { return x; }) * inverse_dim;
  const float squares = sum_over<kAdd>(row, dim, [mean](VecF x, int n) {
    if (!kLayer) return x * x;
    const VecF centred = n == W ? x - mean : first_n(x - mean, n);
    return centred * centred;
  });
  const float scale = 1.0f / __builtin_sqrtf(squares * inverse_dim + p.eps);

  const WT* weight = static_cast<const WT*>(p.weight);
  const WT* bias = static_cast<const WT*>(p.bias);
  const float offset = p.weight_offset;
  int64_t i = 0;
  for (; i + W <= dim; i += W) {
    const VecF x = load_sum<kAdd>(row, i, W);
    if (kAdd) store(row.residual + i, x);
    const VecF w = load(weight + i);
    store(row.out + i, kLayer ? (x - mean) * scale * w + load(bias + i) : x * scale * (w + offset));
  }
  if (i < dim) {
    const int n = static_cast<int>(dim - i);
    const VecF x = load_sum<kAdd>(row, i, n);
    if (kAdd) store_n(row.residual + i, x, n);
    const VecF w = load_n(weight + i, n);
    store_n(row.out + i, kLayer ? (x - mean) * scale * w + load_n(bias + i, n) : x * scale * (w + offset), n);
  }
}

template <class T>
FIC_INLINE T* row_at(const Rows& rows, int64_t outer, int64_t inner) {
  return static_cast<T*>(rows.data) + outer * rows.stride_outer + inner * rows.stride_inner;
}

template <class T, class WT, bool kLayer, bool kAdd>
void run(const NormParams& p) {
  const int64_t row_bytes = p.dim * static_cast<int64_t>(sizeof(T)) * (kAdd ? 4 : 2);
  parallel_ranges(p.outer * p.inner, rows_per_range(row_bytes), [&p](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t outer = r / p.inner, inner = r % p.inner;
      norm_row<T, WT, kLayer, kAdd>(p, {row_at<const T>(p.in, outer, inner), row_at<T>(p.out, outer, inner),
                                        kAdd ? row_at<T>(p.residual, outer, inner) : nullptr});
    }
  });
}

template <class T, class WT>
void run_kind(const NormParams& p) {
  if (p.layer_norm) {
    run<T, WT, true, false>(p);
  } else if (p.residual.data != nullptr) {
    run<T, WT, false, true>(p);
  } else {
    run<T, WT, false, false>(p);
  }
}

template <class T>
void run_weight(const NormParams& p) {
  if (p.weight_dtype == DType::f32) {
    run_kind<T, float>(p);
  } else {
    run_kind<T, T>(p);
  }
}

}  // namespace

void norm(const NormParams& p) {
  if (p.dtype == DType::f32)
    run_kind<float, float>(p);
  else if (p.dtype == DType::f16)
    run_weight<f16>(p);
  else
    run_weight<bf16>(p);
}

}  // namespace flashinfer_core::FIC_ISA
