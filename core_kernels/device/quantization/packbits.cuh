// Packing of booleans into bits: one thread a byte of the result, which reads up to eight elements. With segments, each
// of which begins at a byte of its own, the thread first searches the one that its byte belongs to. Bytes past the last
// segment stay as they are, and nothing outside of x is read, whatever the segments say.
//
// Roofline: reads 8 elements for a byte. DRAM bounds long masks; each line is read once and serves a warp from L1.
#include "device/common/indices.cuh"
#include "device/ptx/memory.cuh"
#include "device/quantization/params.h"

namespace flashinfer_core::cuda {
namespace {

template <class T>
__device__ uint32_t pack(const PackBitsParams& p, int64_t begin, int64_t end) {
  uint32_t byte = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const bool bit = begin + i < end && static_cast<const T*>(p.x)[(begin + i) * p.stride] != 0;
    byte |= static_cast<uint32_t>(bit) << (p.little ? i : 7 - i);
  }
  return byte;
}

}  // namespace

extern "C" __global__ void FIC_KERNEL(const __grid_constant__ PackBitsParams p) {
  wait_for_previous_kernel();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= p.out_size) return;
  int64_t begin = 8 * at, end = p.size;
  if (p.indptr.data != nullptr) {
    const int64_t segment = segment_of(p.out_indptr, at);
    if (segment < 0) return;
    begin = read_index(p.indptr, segment) + 8 * (at - read_index(p.out_indptr, segment));
    end = read_index(p.indptr, segment + 1);
    if (begin < 0) return;
    if (end > p.size) end = p.size;
  }
  uint32_t byte;
  switch (p.element_size) {
    case 1:
      byte = pack<uint8_t>(p, begin, end);
      break;
    case 2:
      byte = pack<uint16_t>(p, begin, end);
      break;
    case 4:
      byte = pack<uint32_t>(p, begin, end);
      break;
    default:
      byte = pack<uint64_t>(p, begin, end);
  }
  p.out[at] = static_cast<uint8_t>(byte);
}

}  // namespace flashinfer_core::cuda
