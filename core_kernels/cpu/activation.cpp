// Gated activations: out = f(gate) * up, where a row of the input is gate, then up.
//
// One thread takes whole rows; a row is one pass of load gate, load up, store. All three functions are written as
// x * g(x), with g between 0 and 1 and correct to a few ulp of itself, so small results in the negative tail keep
// their digits. x * g(x) also has torch's limits: NaN at -inf, inf at inf.
//
// Roofline: an output element moves 3 elements and costs about 25 operations (SiLU) to 40 (GELU). Memory bounds rows
// that come from main memory; the arithmetic bounds rows that still lie in the L2 cache.
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/vec.h"

namespace flashinfer_core::FIC_ISA {
namespace {

constexpr float kLog2e = 1.44269504088896341f;

// x / (1 + e^-u), where u has the sign of x. Only e^-|u| is formed, which needs no care for overflow.
FIC_INLINE VecF times_sigmoid(VecF x, VecF u) {
  const VecF e = exp2_nonpositive((u < 0.0f ? u : -u) * kLog2e);
  return (u < 0.0f ? x * e : x) / (1.0f + e);
}

FIC_INLINE VecF silu(VecF x) { return times_sigmoid(x, x); }

// 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), which is x / (1 + e^(-2 u)).
FIC_INLINE VecF gelu_tanh(VecF x) { return times_sigmoid(x, x * (1.59576912160573071f + 0.0713548162726f * x * x)); }

// x times the normal distribution function of x. Its upper tail Q(y) for y = |x| is e^(-y^2 / 2) t P(t) with
// t = 1 / (1 + 0.3 y): P is a relative-error fit on y in [0, 13.5] (error 1.3e-7), past which Q(y) is 0 in float32.
FIC_INLINE VecF gelu(VecF x) {
  const VecF y = x < 0.0f ? -x : x;
  const VecF t = 1.0f / (1.0f + 0.3f * y);
  VecF p = splat(3.593167088e-2f);
  p = p * t - 1.582757265e-1f;
  p = p * t + 2.082061243e-1f;
  p = p * t - 5.539339496e-2f;
  p = p * t + 1.294689571e-1f;
  p = p * t + 9.963756810e-2f;
  p = p * t + 1.207983462e-1f;
  p = p * t + 1.196263905e-1f;
  const VecF tail = exp2_nonpositive(-0.5f * kLog2e * y * y) * t * p;
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

template <Activation kind>
FIC_INLINE VecF apply(VecF gate, VecF up) {
  if (kind == Activation::silu) return silu(gate) * up;
  if (kind == Activation::gelu) return gelu(gate) * up;
  return gelu_tanh(gate) * up;
}

template <class T, Activation kind>
void run(const ActivationParams& p) {
  const int64_t row_bytes = 3 * p.dim * static_cast<int64_t>(sizeof(T));
  parallel_ranges(p.outer * p.inner, rows_per_range(row_bytes), [&p](int64_t begin, int64_t end) {
    const int64_t dim = p.dim;
    for (int64_t r = begin; r < end; ++r) {
      const int64_t outer = r / p.inner, inner = r % p.inner;
      const T* gate = static_cast<const T*>(p.in.data) + outer * p.in.stride_outer + inner * p.in.stride_inner;
      const T* up = gate + dim;
      T* out = static_cast<T*>(p.out.data) + outer * p.out.stride_outer + inner * p.out.stride_inner;
      int64_t i = 0;
      for (; i + W <= dim; i += W) store(out + i, apply<kind>(load(gate + i), load(up + i)));
      if (i < dim) {
        const int n = static_cast<int>(dim - i);
        store_n(out + i, apply<kind>(load_n(gate + i, n), load_n(up + i, n)), n);
      }
    }
  });
}

template <class T>
void run_kind(const ActivationParams& p) {
  switch (p.kind) {
    case Activation::silu:
      return run<T, Activation::silu>(p);
    case Activation::gelu:
      return run<T, Activation::gelu>(p);
    case Activation::gelu_tanh:
      return run<T, Activation::gelu_tanh>(p);
  }
}

}  // namespace

void activation(const ActivationParams& p) {
  if (p.dtype == DType::f32)
    run_kind<float>(p);
  else if (p.dtype == DType::f16)
    run_kind<f16>(p);
  else
    run_kind<bf16>(p);
}

}  // namespace flashinfer_core::FIC_ISA
