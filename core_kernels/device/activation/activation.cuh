// Gated activations: out = f(gate) * up, where a row of the input is gate, then up.
//
// All vectors of the result (16 bytes, or single elements where the layout forbids it) form one list, whatever the
// shape; a thread takes two, and asks for gate and up of both before it uses the first.
//
// All three functions are x * g(x), with g between 0 and 1 and correct to a few ulp of itself, so small results in the
// negative tail keep their digits. x * g(x) also has torch's limits: NaN at -inf, inf at inf.
//
// Roofline: an element of the result moves 3 elements and costs about 10 (SiLU) to 18 (GELU) instructions, two of them
// on the special function unit. An SM of an H200 moves 18 bytes a clock, so in bf16 it has time for 40: DRAM bounds it.
#include "device/activation/params.h"
#include "device/common/numbers.cuh"
#include "device/common/reduce.cuh"
#include "device/ptx/math.cuh"

namespace flashinfer_core::cuda {
namespace {

using T = Number<DType{FIC_DTYPE}>;
constexpr auto kKind = Activation{FIC_KIND};
constexpr int kWidth = FIC_VECTORS ? 16 / T::kBytes : 1;
constexpr int kThreads = 256;
constexpr int kPerThread = 2;

// x / (1 + e^-u), where u has the sign of x. Only e^-|u| is formed, which needs no care for overflow.
__device__ float times_sigmoid(float x, float u) {
  const float e = exp2_fast((u < 0.0f ? u : -u) * kLog2E);
  return (u < 0.0f ? x * e : x) * reciprocal(1.0f + e);
}

// x times the normal distribution function of x. Its upper tail Q(y) for y = |x| is e^(-y^2 / 2) t P(t) with
// t = 1 / (1 + 0.3 y): P is a relative-error fit on y in [0, 13.5] (error 1.3e-7), past which Q(y) is 0 in float32.
__device__ float gelu(float x) {
  const float y = fabsf(x);
  const float t = reciprocal(1.0f + 0.3f * y);
  float p = 3.593167088e-2f;
  p = p * t - 1.582757265e-1f;
  p = p * t + 2.082061243e-1f;
  p = p * t - 5.539339496e-2f;
  p = p * t + 1.294689571e-1f;
  p = p * t + 9.963756810e-2f;
  p = p * t + 1.207983462e-1f;
  p = p * t + 1.196263905e-1f;
  const float tail = exp2_fast(-0.5f * kLog2E * y * y) * t * p;
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

__device__ float activate(float x) {
  if constexpr (kKind == Activation::silu) return times_sigmoid(x, x);
  if constexpr (kKind == Activation::gelu) return gelu(x);
  // 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), which is x / (1 + e^(-2 u)).
  return times_sigmoid(x, x * (1.59576912160573071f + 0.0713548162726f * x * x));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) FIC_KERNEL(const __grid_constant__ ActivationParams p) {
  const int64_t per_row = p.dim / kWidth, total = p.outer * p.inner * per_row;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kPerThread) + threadIdx.x;
  Vector<T, kWidth> gates[kPerThread], ups[kPerThread];
  void* outs[kPerThread];
  wait_for_previous_kernel();
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int64_t at = first + i * kThreads;
    if (at >= total) break;
    const RowIndex place = row_index(at, per_row);  // row, vector in the row
    const RowIndex row = row_index(place.outer, p.inner);
    const void* in = row_at<T>(p.in, row);
    gates[i].load(in, place.inner * kWidth);
    ups[i].load(in, p.dim + place.inner * kWidth);
    outs[i] = static_cast<char*>(row_at<T>(p.out, row)) + place.inner * (kWidth * T::kBytes);
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (first + i * kThreads >= total) break;
    float gate[kWidth], up[kWidth];
    gates[i].unpack(gate);
    ups[i].unpack(up);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) gate[j] = activate(gate[j]) * up[j];
    gates[i].pack(gate);
    gates[i].store(outs[i], 0);
  }
}

}  // namespace flashinfer_core::cuda
