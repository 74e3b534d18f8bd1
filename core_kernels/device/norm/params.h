#pragma once

#include "device/common/params.h"

namespace flashinfer_core {

// x = in (+ residual, which is then set to x), in float32 and not yet rounded. RMSNorm: out = x / rms(x) *
// (weight_offset + weight). Layer norm: out = (x - mean(x)) / deviation(x) * weight + bias.
struct NormParams {
  DType dtype, weight_dtype;  // weight_dtype is dtype or f32
  bool layer_norm;
  int64_t outer, inner, dim;
  Rows in, out, residual;  // residual.data null: none
  const void* weight;      // [dim]
  const void* bias;        // [dim], of weight_dtype; used by layer norm only
  float weight_offset, eps;
};

namespace cuda {

struct NormLaunch {
  NormParams norm;
  RowShape shape;
};

}  // namespace cuda
}  // namespace flashinfer_core
