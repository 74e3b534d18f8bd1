// Fast float32 functions with about one unit in the last place of error.
#pragma once

namespace flashinfer_core::cuda {

constexpr float kLog2E = 1.4426950408889634f;

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float log2_fast(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Absolute error below 3e-7: the tanh instruction's 5e-4 would show in a log-sum-exp.
__device__ inline float tanh_accurate(float x) { return 1.0f - 2.0f * reciprocal(exp2_fast(2.0f * kLog2E * x) + 1.0f); }

}  // namespace flashinfer_core::cuda
