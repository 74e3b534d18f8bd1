// RMSNorm and layer norm over rows, with or without a residual that is added first.
//
// A row is shared by 4 to 512 threads, in vectors of 16 bytes where the layout allows it and element by element where
// it does not. Each thread asks for all its vectors (up to 32 numbers) before it uses the first, and keeps them in
// registers, so a row of up to 16,384 numbers is read once; what lies past that is read a second time, from L2. Weights
// are asked for together with the row if they take few registers. The host gives a row more threads when there are few
// rows: then latency counts, not bandwidth.
//
// Roofline: a row of n numbers moves 2n numbers (4n with a residual) and costs about 4n operations. DRAM bounds many
// rows: 64 us for 8192 x 8192 in bf16 at the 4.2 TB/s of an H200, with a residual 128 us. Few rows take what a launch
// and two dependent trips to memory take: 1.4 us for a row of 4,096.
#include "device/common/numbers.cuh"
#include "device/common/reduce.cuh"
#include "device/norm/params.h"

namespace flashinfer_core::cuda {
namespace {

using T = Number<DType{FIC_DTYPE}>;
using W = Number<DType{FIC_WEIGHT_DTYPE}>;
constexpr bool kLayer = FIC_LAYER, kAdd = FIC_ADD;
constexpr int kWidth = FIC_VECTORS ? 16 / T::kBytes : 1;  // numbers of a vector
constexpr int kKept = kWidth == 1 ? 8 : 32 / kWidth;      // vectors that a thread keeps
constexpr bool kWeightsAhead = !kLayer && W::kBytes == 2;
constexpr int kMinCtas = kAdd || kWidth == 1 ? 1 : 0;  // 1 keeps ptxas from spilling for one CTA more an SM
using Floats = float[kWidth];

struct Row {
  const void* in;
  void* out;
  void* residual;
};

// One vector of in, and of the residual.
struct Piece {
  Vector<T, kWidth> in, residual;

  __device__ void load(const Row& row, int64_t offset) {
    in.load(row.in, offset);
    if constexpr (kAdd) residual.load(row.residual, offset);
  }
  __device__ void sum(Floats& x) const {
    in.unpack(x);
    if constexpr (kAdd) {
      Floats other;
      residual.unpack(other);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) x[j] += other[j];
    }
  }
  // The sums of the elements, and of the squares of their distances from the mean.
  __device__ float total() const {
    Floats x;
    sum(x);
    float total = 0.0f;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) total += x[j];
    return total;
  }
  __device__ float squares(float mean) const {
    Floats x;
    sum(x);
    float total = 0.0f;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) total += (x[j] - mean) * (x[j] - mean);
    return total;
  }
};

struct Weights {
  Vector<W, kWidth> weight, bias;

  __device__ void load(const NormParams& p, int64_t offset) {
    weight.load_weight(p.weight, offset);
    if constexpr (kLayer) bias.load_weight(p.bias, offset);
  }
};

__device__ void finish(const NormParams& p, const Row& row, int64_t offset, const Piece& piece, const Weights& weights,
                       float mean, float scale) {
  Floats x, w, b;
  piece.sum(x);
  Vector<T, kWidth> result;
  if constexpr (kAdd) {
    result.pack(x);
    result.store(row.residual, offset);
  }
  weights.weight.unpack(w);
  if constexpr (kLayer) weights.bias.unpack(b);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    x[j] = kLayer ? (x[j] - mean) * scale * w[j] + b[j] : x[j] * scale * (w[j] + p.weight_offset);
  }
  result.pack(x);
  result.store(row.out, offset);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kMaxRowThreads, kMinCtas)
    FIC_KERNEL(const __grid_constant__ NormLaunch launch) {
  __shared__ float scratch[2][kMaxRowThreads / 32];
  const NormParams& p = launch.norm;
  const RowPlace place = row_place(launch.shape);
  const RowIndex index = row_index(static_cast<uint32_t>(place.row), static_cast<uint32_t>(p.inner));
  const Row row{row_at<T>(p.in, index), row_at<T>(p.out, index), row_at<T>(p.residual, index)};
  const int64_t dim = index.outer < p.outer ? p.dim : 0;  // threads past the last row only take part in the sums
  const int32_t first = place.lane * kWidth, step = launch.shape.threads * kWidth;
  const int32_t kept_end = static_cast<int32_t>(dim < kKept * step ? dim : kKept * step);
  wait_for_previous_kernel();

  Piece kept[kKept];
  Weights weights[kKept];
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    if (first + i * step < kept_end) kept[i].load(row, first + i * step);
  }
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    if (kWeightsAhead && first + i * step < kept_end) weights[i].load(p, first + i * step);
  }

  // The sum over the row of f(piece).
  const auto sum_over = [&](auto f, auto& scratch) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      if (first + i * step < kept_end) sum += f(kept[i]);
    }
    for (int64_t offset = first + kKept * step; offset < dim; offset += step) {
      Piece piece;
      piece.load(row, offset);
      sum += f(piece);
    }
    return row_sum(sum, launch.shape, scratch);
  };
  const float inverse_dim = 1.0f / static_cast<float>(p.dim);
  float mean = 0.0f;
  if constexpr (kLayer) {
    mean = sum_over([](const Piece& piece) { return piece.total(); }, scratch[0]) * inverse_dim;
  }
  const float squares = sum_over([mean](const Piece& piece) { return piece.squares(mean); }, scratch[1]);
  const float scale = rsqrtf(squares * inverse_dim + p.eps);

#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    if (first + i * step < kept_end) {
      if (!kWeightsAhead) weights[i].load(p, first + i * step);
      finish(p, row, first + i * step, kept[i], weights[i], mean, scale);
    }
  }
  for (int64_t offset = first + kKept * step; offset < dim; offset += step) {
    Piece piece;
    Weights more;
    piece.load(row, offset);
    more.load(p, offset);
    finish(p, row, offset, piece, more, mean, scale);
  }
}

}  // namespace flashinfer_core::cuda
