// Merges partial attention results over disjoint sets of keys (Dao et al. 2022; Hong et al. 2023):
//     s = log2 sum_i 2^s_i,   v = sum_i 2^(s_i - s) v_i
// States with s_i = -infinity (no visible key) count for nothing, whatever lies in their v; if all are, the result is
// (0, -infinity).
//
// A head of a token is shared by 1 to 32 threads of one warp, in vectors of 16 bytes where the layout allows it. One
// warp because s may be overwritten: all its readers must be done before. Two states are the usual case, compiled for
// itself: their four vectors and two s are asked for at once.
//
// Roofline: reads num_states vectors of head_dim and writes one, with two operations a value: DRAM bounds it, 48 us for
// two states of 8192 x 32 x 128 in bf16 at the 4.2 TB/s of an H200.
#include "device/cascade/params.h"
#include "device/common/numbers.cuh"
#include "device/common/reduce.cuh"
#include "device/ptx/math.cuh"

namespace flashinfer_core::cuda {
namespace {

using T = Number<DType{FIC_DTYPE}>;
constexpr int kThreads = 128;     // of a CTA
constexpr bool kPair = FIC_PAIR;  // exactly two states
constexpr int kWidth = FIC_VECTORS ? 16 / T::kBytes : 1;
constexpr int kVectors = kPair ? 2 : 1, kStates = kPair ? 2 : 4;  // that a thread has in flight

__device__ float none() { return __uint_as_float(0xff800000u); }

// The states of one head of one token.
struct States {
  const MergeStatesParams& p;
  int64_t token, head;
  bool written;

  __device__ int32_t count() const { return kPair ? 2 : p.num_states; }
  __device__ const StateView& view(int32_t i) const { return i == 0 ? p.first : p.second; }
  __device__ int64_t strides(int32_t i) const { return kPair || i == 0 ? 0 : i - 1; }
  __device__ float s(int32_t i) const {
    const StateView& x = view(i);
    return x.s[token * x.s_stride_token + head * x.s_stride_head + strides(i) * p.s_stride_state];
  }
  __device__ void load_v(int32_t i, int64_t element, Vector<T, kWidth>& v) const {
    const StateView& x = view(i);
    v.load(x.v, token * x.v_stride_token + head * x.v_stride_head + strides(i) * p.v_stride_state + element);
  }
};

// Vectors at, at + threads, ... of states i, i + 1, ..., and their s, -infinity for a state or row that there is not.
struct Chunk {
  float s[kStates];
  Vector<T, kWidth> v[kStates][kVectors];

  __device__ void load(const States& states, int32_t i, int32_t at, int32_t threads, int32_t end) {
#pragma unroll
    for (int k = 0; k < kStates; ++k) s[k] = states.written && i + k < states.count() ? states.s(i + k) : none();
#pragma unroll
    for (int k = 0; k < kStates; ++k) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int32_t vector = at + j * threads;
        if (i + k < states.count() && vector < end) states.load_v(i + k, vector * kWidth, v[k][j]);
      }
    }
  }

  __device__ void add_to(float (&sums)[kWidth], int j, float top) const {
#pragma unroll
    for (int k = 0; k < kStates; ++k) {
      if (s[k] == none()) continue;
      const float weight = exp2_fast(s[k] - top);
      float x[kWidth];
      v[k][j].unpack(x);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sums[e] += x[e] * weight;
    }
  }
};

__device__ void store(const MergeStatesParams& p, const States& states, int32_t vector, float (&sums)[kWidth],
                      float scale) {
#pragma unroll
  for (int e = 0; e < kWidth; ++e) sums[e] *= scale;
  Vector<T, kWidth> result;
  result.pack(sums);
  result.store(p.v_out, states.token * p.v_out_stride_token + states.head * p.v_out_stride_head + vector * kWidth);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kPair ? 1 : 6)
    FIC_KERNEL(const __grid_constant__ MergeLaunch launch) {
  wait_for_previous_kernel();
  const MergeStatesParams& p = launch.merge;
  const RowPlace place = row_place(launch.shape);
  const int32_t threads = launch.shape.threads;
  const RowIndex index = row_index(static_cast<uint32_t>(place.row), static_cast<uint32_t>(p.num_heads));
  const int64_t token = index.outer, head = index.inner;
  const bool written = token < p.num_tokens && (p.mask == nullptr || p.mask[token] != 0);
  const int32_t end = written ? p.head_dim / kWidth : 0;
  const States states{p, token, head, written};

  int32_t at = place.lane;
  Chunk chunk;
  chunk.load(states, 0, at, threads, end);
  float top = none(), total = 0.0f;
  const auto raise = [&](float s) { top = s > top || s != s ? s : top; };
  const auto add = [&](float s) { total += top == none() ? 0.0f : exp2_fast(s - top); };
  if constexpr (kPair) {  // both came with the vectors: no second trip to memory
    raise(chunk.s[0]), raise(chunk.s[1]);
    add(chunk.s[0]), add(chunk.s[1]);
  } else if (written) {
    for (int32_t i = 0; i < states.count(); ++i) raise(states.s(i));
    for (int32_t i = 0; i < states.count(); ++i) add(states.s(i));
  }
  const float scale = top == none() ? 0.0f : reciprocal(total);

  while (at < end) {
    if constexpr (kPair) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        float sums[kWidth] = {};
        chunk.add_to(sums, j, top);
        if (at + j * threads < end) store(p, states, at + j * threads, sums, scale);
      }
    } else {
      float sums[kWidth] = {};
      chunk.add_to(sums, 0, top);
      for (int32_t i = kStates; i < states.count(); i += kStates) {
        chunk.load(states, i, at, threads, end);
        chunk.add_to(sums, 0, top);
      }
      store(p, states, at, sums, scale);
    }
    at += kVectors * threads;
    if (at < end) chunk.load(states, 0, at, threads, end);
  }
  __syncwarp();
  if (written && place.lane == 0) {
    p.s_out[token * p.s_out_stride_token + head * p.s_out_stride_head] =
        top == none() ? none() : top + log2_fast(total);
  }
}

}  // namespace flashinfer_core::cuda
