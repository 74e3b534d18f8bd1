// Accurate float32 functions.
#pragma once

namespace flashinfer_core::cuda {

// Sine and cosine of any angle that float32 holds exactly, correct to 2e-7 up to 1e9 radians. The reduction to one turn
// is made in float64: in float32 it would need a long way for large angles.
__device__ inline void sin_cos(float angle, float* sine, float* cosine) {
  const double half_turns = static_cast<double>(angle) * 0.31830988618379067154;
  sincospif(static_cast<float>(half_turns - 2.0 * rint(0.5 * half_turns)), sine, cosine);
}

}  // namespace flashinfer_core::cuda
