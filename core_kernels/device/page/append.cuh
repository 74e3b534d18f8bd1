// Writing keys and values into the slots of a paged KV cache, whatever the strides of either.
//
// A token's keys (blockIdx.y 0) or values (1) are shared by up to 512 threads, in vectors of 16 bytes where the layout
// allows it, else element by element. Each thread asks for four vectors, then finds the slot, which takes up to three
// dependent loads, then stores, and goes on with its next four. Equal dtypes are copied as they are; others are
// converted through float32, rounding once, and saturating if the cache is FP8.
//
// Index tensors are known to the GPU alone, so nothing is refused here: a token whose request, position, page or slot
// does not exist is skipped.
//
// Roofline: an element moves twice and costs nothing (a conversion: 2 to 10 instructions). DRAM bounds it: 16 us for
// 8,192 tokens of 8 heads of 128 in bf16 at the 4.27 TB/s of an H200, of which 17 are reached. Tried and lost: eight
// vectors under way (6 %), and the slot asked for before the vectors.
#include "device/common/indices.cuh"
#include "device/common/numbers.cuh"
#include "device/common/reduce.cuh"
#include "device/page/params.h"

namespace flashinfer_core::cuda {
namespace {

using In = Number<DType{FIC_IN_DTYPE}>;
using Cached = Number<DType{FIC_CACHE_DTYPE}>;
constexpr bool kCopy = FIC_IN_DTYPE == FIC_CACHE_DTYPE;
constexpr bool kFp8 = !kCopy && Cached::kBytes == 1;
constexpr int kWidth = FIC_VECTORS ? (kCopy ? 16 / In::kBytes : 8) : 1;
constexpr int kInFlight = 4;

struct Slot {
  int64_t page, offset;  // page -1: none
};

// The page of a token, and its slot there. Dividing numbers of 64 bits takes as long as a load.
__device__ Slot divide(int64_t token, int64_t page_size) {
  const RowIndex at = (token | page_size) >> 32 == 0
                          ? row_index(static_cast<uint32_t>(token), static_cast<uint32_t>(page_size))
                          : row_index(token, page_size);
  return {at.outer, at.inner};
}

__device__ Slot slot_of(const AppendLaunch& p, int64_t token) {
  constexpr Slot kNone{-1, 0};
  const int64_t page_size = p.append.page_size;
  if (p.slots.data != nullptr) {
    const int64_t slot = read_index(p.slots, token);
    if (slot < 0 || slot >= p.num_pages * page_size) return kNone;
    return divide(slot, page_size);
  }
  const int64_t request = read_index(p.batch_indices, token), position = read_index(p.positions, token);
  if (request < 0 || request >= p.kv_last_page_len.size || position < 0) return kNone;
  const int64_t begin = read_index(p.kv_indptr, request), end = read_index(p.kv_indptr, request + 1);
  const int64_t last_page_len = read_index(p.kv_last_page_len, request);
  const Slot place = divide(position, page_size);
  const int64_t entry = begin + place.page;
  if (begin < 0 || end > p.kv_indices.size || entry >= end) return kNone;
  if (position >= (end - begin - 1) * page_size + last_page_len) return kNone;
  const int64_t page = read_index(p.kv_indices, entry);
  if (page < 0 || page >= p.num_pages) return kNone;
  return {page, place.offset};
}

// Vectors [first + i * threads] of a token, i < kInFlight, on their way from input to cache.
struct Batch {
  Vector<In, kWidth> x[kInFlight];
  int64_t out[kInFlight];

  __device__ void load(const AppendPagedKvParams::Stream& s, int64_t token, int32_t first, int32_t threads,
                       int32_t end) {
    const int32_t per_head = static_cast<int32_t>(s.dim / kWidth);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int32_t at = first + i * threads;
      if (at >= end) break;
      const int32_t head = at / per_head, element = (at - head * per_head) * kWidth;
      x[i].load(s.in, token * s.in_stride_token + head * s.in_stride_head + element);
      out[i] = head * s.cache_stride_head + element;
    }
  }

  __device__ void store(const AppendPagedKvParams::Stream& s, Slot slot, float scale, int32_t first, int32_t threads,
                        int32_t end) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i * threads >= end) break;
      const int64_t offset = slot.page * s.cache_stride_page + slot.offset * s.cache_stride_slot + out[i];
      if constexpr (kCopy) {
        x[i].store(s.cache, offset);
      } else {
        float floats[kWidth];
        x[i].unpack(floats);
        if (kFp8 && scale != 1.0f) {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) floats[j] /= scale;
        }
        Vector<Cached, kWidth> converted;
        converted.pack(floats);
        converted.store(s.cache, offset);
      }
    }
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kMaxRowThreads) FIC_KERNEL(const __grid_constant__ AppendLaunch p) {
  wait_for_previous_kernel();
  const RowPlace place = row_place(p.shape);
  const AppendPagedKvParams::Stream& s = p.append.streams[p.first_stream + blockIdx.y];
  if (place.row >= p.append.num_tokens) return;
  const int32_t end = static_cast<int32_t>(p.append.num_heads * (s.dim / kWidth)), threads = p.shape.threads;
  Batch batch;
  batch.load(s, place.row, place.lane, threads, end);
  const Slot slot = slot_of(p, place.row);
  const float scale = kFp8 && s.scale_tensor != nullptr ? s.scale * *s.scale_tensor : s.scale;
  if (slot.page < 0) return;
  for (int32_t first = place.lane; first < end;) {
    batch.store(s, slot, scale, first, threads, end);
    first += kInFlight * threads;
    batch.load(s, place.row, first, threads, end);
  }
}

}  // namespace flashinfer_core::cuda
