#pragma once

#include "device/common/params.h"

namespace flashinfer_core {

// out = activation(first half of in) * second half of in, each half `dim` long.
enum class Activation : int32_t { silu = 0, gelu = 1, gelu_tanh = 2 };

struct ActivationParams {
  DType dtype;
  Activation kind;
  int64_t outer, inner, dim;
  Rows in, out;
};

}  // namespace flashinfer_core
