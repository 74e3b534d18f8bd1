#include "host/launch_ops.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <stdexcept>
#include <string>

namespace flashinfer_core {
namespace {

constexpr int64_t kSmallCta = 128, kUsualCta = 256, kMaxCta = 512;  // threads

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t power_of_2_from(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

int64_t bytes(DType dtype) { return dtype == DType::f32 ? 4 : dtype == DType::f16 || dtype == DType::bf16 ? 2 : 1; }

// Elements that a thread handles at a time: as in the kernels.
int64_t width(const CudaCall& call, DType dtype) { return call.vectors ? 16 / bytes(dtype) : 1; }

uint32_t grid(int64_t ctas) {
  if (ctas > INT32_MAX)
    throw std::invalid_argument("grid: expected at most 2^31 - 1 CTAs, got " + std::to_string(ctas));
  return static_cast<uint32_t>(ctas);
}

// Threads for rows of so many vectors, of which a thread keeps `kept`: as few as can keep the row, so that each has
// many loads in flight; more if there are too few rows to fill the GPU, but with two vectors each, since a sum over
// more warps takes longer than the second load (1.5 us instead of 1.6 for a row of 4,096). Four threads at least read
// 64 bytes side by side.
cuda::RowShape row_shape(const CudaCall& call, int64_t rows, int64_t vectors, int64_t kept, int64_t most_threads) {
  if (rows > INT32_MAX - kMaxCta) {
    throw std::invalid_argument("rows: expected fewer than 2^31 on a GPU, got " + std::to_string(rows));
  }
  const int64_t enough = cuda_device(call.kernel->device()).num_sms * kMaxCta;
  int64_t threads = std::max<int64_t>(ceil_div(vectors, kept), 4);
  while (threads * 2 < vectors && rows * threads < enough) threads *= 2;
  threads = threads <= 32 ? power_of_2_from(threads) : ceil_div(threads, 32) * 32;
  threads = std::min(threads, most_threads);
  if (threads > 32) return {static_cast<int32_t>(threads), 1, 31};
  int32_t shift = 0;
  while (int64_t{1} << shift < threads) ++shift;
  return {static_cast<int32_t>(threads), static_cast<int32_t>(kSmallCta / threads), shift};
}

// Makes one block of rows of all, where the strides allow it: that saves a division in the kernel.
void merge_blocks(int64_t& outer, int64_t& inner, std::initializer_list<const Rows*> tensors) {
  for (const Rows* rows : tensors) {
    if (rows->data != nullptr && rows->stride_outer != inner * rows->stride_inner) return;
  }
  inner *= outer;
  outer = 1;
}

struct RopeGrid {
  uint32_t ctas, threads, smem;
};

// Cuts the work into tasks and shares them out. Tokens that are too small for a CTA share one, unless that leaves SMs
// without work.
RopeGrid share_out(const CudaCall& call, cuda::RopeLaunch& p) {
  const RopeParams& rope = p.rope;
  const auto& [q, k] = rope.heads;
  const bool in_place = q.in == q.out && k.in == k.out;
  const int64_t elements = width(call, rope.dtype);
  p.num_heads = static_cast<int32_t>(q.num_heads + k.num_heads);
  p.rotations = static_cast<int32_t>(rope.rotary_dim / 2 / elements);
  p.copies = in_place ? 0 : static_cast<int32_t>((rope.head_dim - rope.rotary_dim) / elements);
  const int64_t tasks = static_cast<int64_t>(p.num_heads) * (p.rotations + p.copies);  // of a token
  if (tasks == 0 || rope.num_tokens == 0) return {};

  constexpr int64_t kMaxTableBytes = 48 << 10;
  const int64_t table_bytes = rope.rotary_dim * 4;
  int64_t tokens = std::clamp<int64_t>(kMaxCta / tasks, 1, 16);
  tokens = std::min(tokens, std::max<int64_t>(kMaxTableBytes / std::max<int64_t>(table_bytes, 1), 1));
  tokens = std::min(tokens, ceil_div(rope.num_tokens, 4 * cuda_device(call.kernel->device()).num_sms));
  p.tokens_per_cta = static_cast<int32_t>(tokens);
  const int64_t threads = std::min(ceil_div(tokens * tasks, 64) * 32, kMaxCta);  // with two tasks each
  return {grid(ceil_div(rope.num_tokens, tokens)), static_cast<uint32_t>(threads),
          static_cast<uint32_t>(tokens * table_bytes)};
}

}  // namespace

void launch(const CudaCall& call, NormParams p) {
  const int64_t rows = p.outer * p.inner, elements = width(call, p.dtype);
  if (rows == 0 || p.dim == 0) return;
  merge_blocks(p.outer, p.inner, {&p.in, &p.out, &p.residual});
  const cuda::RowShape shape = row_shape(call, rows, p.dim / elements, call.vectors ? 32 / elements : 8, kMaxCta);
  call.kernel->launch({grid(ceil_div(rows, shape.per_cta)), 1, 1}, static_cast<uint32_t>(shape.threads * shape.per_cta),
                      0, call.stream, cuda::NormLaunch{p, shape}, call.pdl);
}

void launch(const CudaCall& call, ActivationParams p) {
  const int64_t vectors = p.outer * p.inner * (p.dim / width(call, p.dtype));
  if (vectors == 0) return;
  merge_blocks(p.outer, p.inner, {&p.in, &p.out});
  call.kernel->launch({grid(ceil_div(vectors, 2 * kUsualCta)), 1, 1}, kUsualCta, 0, call.stream, p, call.pdl);
}

void launch(const CudaCall& call, cuda::RopeLaunch p) {
  const RopeGrid grid = share_out(call, p);
  if (grid.ctas > 0) call.kernel->launch({grid.ctas, 1, 1}, grid.threads, grid.smem, call.stream, p, call.pdl);
}

void launch(const CudaCall& call, cuda::RopeLaunch p, const float* frequencies) {
  const RopeGrid grid = share_out(call, p);
  if (grid.ctas == 0) return;
  cuda::RopeByFrequencyLaunch with_frequencies;
  static_cast<cuda::RopeLaunch&>(with_frequencies) = p;
  std::memcpy(with_frequencies.frequencies, frequencies, static_cast<size_t>(p.rope.rotary_dim / 2) * sizeof(float));
  call.kernel->launch({grid.ctas, 1, 1}, grid.threads, grid.smem, call.stream, with_frequencies, call.pdl);
}

void launch(const CudaCall& keys, const CudaCall& values, cuda::AppendLaunch p) {
  const CudaCall* calls[2] = {&keys, &values};
  const int32_t alike = keys.kernel == values.kernel ? 2 : 1;  // streams of a launch
  for (int32_t first = 0; first < 2; first += alike) {
    const CudaCall& call = *calls[first];
    int64_t vectors = 0;
    for (int32_t i = first; i < first + alike; ++i) {
      const AppendPagedKvParams::Stream& s = p.append.streams[i];
      const int64_t elements = !call.vectors ? 1 : s.same_dtype ? 16 / s.element_size : 8;
      vectors = std::max(vectors, p.append.num_heads * (s.dim / elements));
    }
    if (vectors == 0 || p.append.num_tokens == 0) continue;
    p.first_stream = first;
    p.shape = row_shape(call, alike * p.append.num_tokens, vectors, 8, kMaxCta);
    call.kernel->launch({grid(ceil_div(p.append.num_tokens, p.shape.per_cta)), static_cast<uint32_t>(alike), 1},
                        static_cast<uint32_t>(p.shape.threads * p.shape.per_cta), 0, call.stream, p, call.pdl);
  }
}

void launch(const CudaCall& call, const cuda::BatchPositionsParams& p) {
  if (p.nnz > 0) call.kernel->launch({grid(ceil_div(p.nnz, kUsualCta)), 1, 1}, kUsualCta, 0, call.stream, p, call.pdl);
}

void launch(const CudaCall& call, const cuda::SeqLensParams& p) {
  const int64_t requests = p.kv_last_page_len.size;
  if (requests > 0)
    call.kernel->launch({grid(ceil_div(requests, kUsualCta)), 1, 1}, kUsualCta, 0, call.stream, p, call.pdl);
}

void launch(const CudaCall& call, const MergeStatesParams& p) {
  const int64_t rows = p.num_tokens * p.num_heads;
  if (rows == 0) return;
  const cuda::RowShape shape = row_shape(call, rows, p.head_dim / width(call, p.dtype), 2, 32);
  call.kernel->launch({grid(ceil_div(rows, shape.per_cta)), 1, 1}, kSmallCta, 0, call.stream,
                      cuda::MergeLaunch{p, shape}, call.pdl);
}

void launch(const CudaCall& call, const cuda::PackBitsParams& p) {
  if (p.out_size > 0)
    call.kernel->launch({grid(ceil_div(p.out_size, kUsualCta)), 1, 1}, kUsualCta, 0, call.stream, p, call.pdl);
}

}  // namespace flashinfer_core
