// Launches of the small operations' CUDA kernels: the shape of the grid follows from the arguments, and from nothing
// that lies on the GPU. A call without work launches nothing.
#pragma once

#include <cstdint>

#include "device/activation/params.h"
#include "device/cascade/params.h"
#include "device/norm/params.h"
#include "device/page/params.h"
#include "device/quantization/params.h"
#include "device/rope/params.h"
#include "host/driver.h"

namespace flashinfer_core {

struct CudaCall {
  const CudaKernel* kernel;
  bool vectors;  // whether the kernel is the one for 16-byte accesses
  uintptr_t stream;
  bool pdl;
};

void launch(const CudaCall& call, NormParams p);
void launch(const CudaCall& call, ActivationParams p);
void launch(const CudaCall& call, cuda::RopeLaunch p);                            // by a table
void launch(const CudaCall& call, cuda::RopeLaunch p, const float* frequencies);  // which are on CPU
void launch(const CudaCall& keys, const CudaCall& values, cuda::AppendLaunch p);
void launch(const CudaCall& call, const cuda::BatchPositionsParams& p);
void launch(const CudaCall& call, const cuda::SeqLensParams& p);
void launch(const CudaCall& call, const MergeStatesParams& p);
void launch(const CudaCall& call, const cuda::PackBitsParams& p);

}  // namespace flashinfer_core
