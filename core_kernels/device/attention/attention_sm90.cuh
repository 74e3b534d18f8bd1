// The attention kernel for Hopper (SM90): prefill, append and cascade levels, with 16-bit keys and values.
//
// Tile. 128 packed query rows (token * group + head in group), 64 for each of two warpgroups, whose scores and output
// stay in the registers of wgmma. They share the blocks of keys that a third warpgroup brings through rings of two or
// three stages, see pipeline_sm90.cuh. With heads packed into rows, a tile of a group of 4 is 32 tokens, so its keys
// end within 32 keys of where the causal mask does.
//
// Pipeline. The scores of the next block are multiplied ahead of the values of this one, so that the softmax runs
// beside a product. ptxas would move the wait for that product ahead of the softmax; the branch around rescaling (most
// blocks leave every maximum as it is) holds it back. The last block comes first, since it has the masks, and as half a
// block if the rest of its keys is no more.
//
// Grid. One CTA an SM takes items from the schedule, as the universal kernel does, and leaves the same partial states.
//
// Roofline. A tile does 128 * 4 * dim operations for each key and value that it reads from L2, 4.7 TB/s of reads at
// 600 TFLOP/s, so the tensor cores bound it, of whose rate two thirds are reached. In runs of more than some ms the
// power limit does: the clock falls from 1980 to 1700 MHz, and times by as much.
//
// Measured on one H200 (bf16, 32 / 8 heads; TFLOP/s; in brackets cuDNN in the same run). Causal, head_dim 128:
// 1 x 8,192 620 (537), 4 x 4,096 646 (603), 16 x 1,024 456 (471), 1 x 32,768 656 (584); full 4 x 4,096 676 (683); 64
// heads 610 (607); head_dim 64 415 (435), 256 684 (583); 512 new tokens on 8,192 keys in pages of 16, 8 requests: 576
// to 627.
//
// What was tried, and what it won or lost at 4 x 4,096 causal, head_dim 128 unless another is named:
//   blocks of 160 keys instead of 128: +4 %; 176: the same; at head_dim 64 192 instead of 128: +5 %
//   the half block: +2 %, at 16 x 1,024 +7 %
//   warpgroups in turns, handing over when the products are started: -2 %; when the scores are there: -3 %; with the
//   values' product held back until then: -5 %
//   scores two blocks ahead, with blocks of 112 keys to make room: -7 %; at head_dim 64, with 128: -12 %. So what is
//   missing is not overlap: products slow down the arithmetic beside them
//   a quarter of the exponentials by a polynomial: -7 %; at head_dim 64: +1 %
//   two CTAs an SM at head_dim 64: with 80 registers a thread ptxas serializes wgmma
#include "device/attention/pipeline_sm90.cuh"
#include "device/attention/results.cuh"
#include "device/attention/softmax.cuh"
#include "device/ptx/wgmma.cuh"

namespace flashinfer_core::cuda {
namespace {

constexpr int kWarpgroup = 128;
constexpr int kLoadRegisters = 40, kMultiplyRegisters = 232;  // of a thread
static_assert(kWarpgroup * (kLoadRegisters + 2 * kMultiplyRegisters) <= 65536);
constexpr int kHalfBlock = (kBlockKeys / 2 + 15) / 16 * 16;
using Output = float[kRowFragments][kDimVo / 8][4];
static_assert(kRowFragments == 1, "a warp has 16 rows of a wgmma");

// Starts s = q k for this warpgroup's rows and a number of keys.
template <int Tiles>
__device__ inline void multiply_keys(Operand queries, Operand keys, float (&s)[1][Tiles][4]) {
  start_products();
#pragma unroll
  for (int step = 0; step < kDimQk / 16; ++step) {
    const int panel = step / 4, offset = step % 4 * 32;
    Wgmma<Math, 8 * Tiles>::multiply(s[0], queries.at(panel * kQueryPanel + offset),
                                     keys.at(panel * kBlockPanel + offset), step > 0);
  }
  commit_products();
}

// Starts o += weights v. The weights are A operands of steps of 16 keys.
template <int Steps>
__device__ inline void multiply_values(Operand values, const uint32_t (&weights)[Steps][4], Output& o) {
  start_products();
#pragma unroll
  for (int step = 0; step < Steps; ++step) {
    Wgmma<Math, kDimVo>::multiply_add(o[0], weights[step], values.at(step * 16 * kPanelRow));
  }
  commit_products();
}

template <int Steps>
__device__ inline void pack(const float (&s)[1][2 * Steps][4], uint32_t (&weights)[Steps][4]) {
#pragma unroll
  for (int step = 0; step < Steps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&pair)[4] = s[0][2 * step + i / 2];
      weights[step][i] = Math::pack(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
    }
  }
}

// What lies in a box beside the keys of the request that the item sees may be anything, and 0 times NaN is NaN: this
// warpgroup overwrites those values with zeros, before the item's first key and after the request's last one. Boxes
// that hold no key at all are zeros already.
__device__ inline void clear_values(const AttentionSm90Params& p, const Item& item, int block_key, char* values) {
  const int begin = item.key_begin - block_key, end = item.request.kv_len - block_key;
  if (begin <= 0 && end >= kBlockKeys) return;
  const int box_end = min_of(kBlockKeys, (end + p.box_keys - 1) / p.box_keys * p.box_keys);
  const int thread = threadIdx.x % kWarpgroup;
  for (int row = thread / 8; row < box_end; row += kWarpgroup / 8) {
    if (row >= begin && row < end) continue;
#pragma unroll
    for (int panel = 0; panel < kValuePanels; ++panel) {
      *reinterpret_cast<uint4*>(values + panel * kBlockPanel + row * kPanelRow + thread % 8 * 16) =
          make_uint4(0, 0, 0, 0);
    }
  }
  publish_to_async_proxy();
  sync_threads(1 + threadIdx.x / kWarpgroup, kWarpgroup);
}

// Exchanges words within a quad of lanes, so that lane i gets the i-th word of each: 16 bytes of one row to store at a
// time.
__device__ inline void transpose_quad(uint32_t (&x)[4]) {
  const bool odd = (lane_id() & 1) != 0, high = (lane_id() & 2) != 0;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? x[i] : x[i + 1], 1);
    (odd ? x[i] : x[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, high ? x[i] : x[i + 2], 2);
    (high ? x[i] : x[i + 2]) = other;
  }
}

// Writes what a warp holds of its rows.
__device__ inline void write_rows(const AttentionParams& p, const Item& item, int warp_row, float scale,
                                  const RowState& state, const Output& o) {
  const int gr = lane_id() / 4, tq = lane_id() % 4;
#pragma unroll
  for (int i = 0; i < RowRules::kRows; ++i) {
    const float sum = state.total(i);
    const ResultRow row(p, item, warp_row + i * 8 + gr, item.num_chunks > 1);
    const float factor = row.close(state.logit(i, scale), sum, row.exists() && tq == 0);
    if (kOutBytes == 4 || item.num_chunks > 1) {
#pragma unroll
      for (int n = 0; n < kDimVo / 8; ++n) {
        if (row.exists()) row.store<2>(8 * n + 2 * tq, {o[0][n][2 * i] * factor, o[0][n][2 * i + 1] * factor});
      }
    } else {
#pragma unroll
      for (int n = 0; n < kDimVo / 8; n += 4) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          words[j] = OutMath::pack(o[0][n + j][2 * i] * factor, o[0][n + j][2 * i + 1] * factor);
        }
        transpose_quad(words);
        if (row.exists()) row.store_words(8 * (n + tq), words);
      }
    }
  }
}

// The two warpgroups that multiply: 64 rows each.
class Attention {
 public:
  __device__ Attention(const AttentionSm90Params& p, const Shared& shared, int warp)
      : p_(p), shared_(shared), warp_row_(warp * 16), queries_(shared.queries + warp / 4 * (64 * kPanelRow)) {
    bool negative;
    const float scale = logit_scale(p, &negative);
    scale_ = scale;
    base2_scale_ = kTransformed ? 1.0f : scale * kLog2E;
  }

  __device__ void run() {
    Ring<2> slots;
    while (true) {
      wait(shared_.work_full(slots.stage), slots.round);
      const Work& work = shared_.work(slots.stage);
      if (work.done) break;
      attend(work.item);
      arrive_warp(shared_.work_free(slots.stage));
      slots.next();
    }
  }

 private:
  __device__ void attend(const Item& item) {
    const Blocks blocks(p_, item);
    const RowRules rules(p_, item, warp_row_);
    RowState state;
    Output o = {};
    float factor[RowRules::kRows];
    wait(shared_.queries_full(), tiles_.round);
    tiles_.next();
    int block = blocks.count - 1;
    if (block >= 0 && item.key_end - blocks.key(block) <= kHalfBlock) {
      float s[1][kHalfBlock / 8][4];
      uint32_t weights[kHalfBlock / 16][4];
      start_scores(s);
      finish_scores<0>(s, block == 0);
      weigh(item, rules, blocks.key(block), s, state, factor);
      pack(s, weights);
      start_output(item, blocks.key(block), weights, o);
      finish_output(o);
      --block;
    }
    if (block >= 0) {
      Scores s;
      uint32_t weights[kBlockKeys / 16][4];
      start_scores(s);
      finish_scores<0>(s, block == 0);
      if (weigh(item, rules, blocks.key(block), s, state, factor)) rescale(factor, o);
      pack(s, weights);
      for (; block > 0; --block) {
        start_scores(s);
        start_output(item, blocks.key(block), weights, o);
        finish_scores<1>(s, block == 1);
        const bool raised = weigh(item, rules, blocks.key(block - 1), s, state, factor);
        finish_output(o);
        if (raised) rescale(factor, o);
        pack(s, weights);
      }
      start_output(item, blocks.key(0), weights, o);
      finish_output(o);
    }
    if (blocks.count == 0) arrive_warp(shared_.queries_free());
    write_rows(p_, item, warp_row_, base2_scale_, state, o);
  }

  // Starts the scores of the next block of keys, or waits for them while `Pending` later products run.
  template <int Tiles>
  __device__ void start_scores(float (&s)[1][Tiles][4]) {
    wait(shared_.keys_full(k_.stage), k_.round);
    multiply_keys(Operand(opaque(queries_)), Operand(shared_.keys(k_.stage)), s);
  }
  template <int Pending, int Tiles>
  __device__ void finish_scores(float (&s)[1][Tiles][4], bool last) {
    wait_for_products<Pending>();
    changed(s[0]);
    arrive_warp(shared_.keys_free(k_.stage));
    if (last) arrive_warp(shared_.queries_free());
    k_.next();
  }

  // Starts what the values of a block add to the output, or waits for it.
  template <int Steps>
  __device__ void start_output(const Item& item, int key, uint32_t (&weights)[Steps][4], Output& o) {
    wait(shared_.values_full(v_.stage), v_.round);
    clear_values(p_, item, key, shared_.base + (shared_.values(v_.stage) - shared_.queries));
    changed(weights);
    multiply_values(Operand(shared_.values(v_.stage), kBlockPanel), weights, o);
  }
  __device__ void finish_output(Output& o) {
    wait_for_products<0>();
    changed(o[0]);
    arrive_warp(shared_.values_free(v_.stage));
    v_.next();
  }

  // Turns scores into weights; returns as RowState::raise.
  template <int Tiles>
  __device__ bool weigh(const Item& item, const RowRules& rules, int key, float (&s)[1][Tiles][4], RowState& state,
                        float (&factor)[RowRules::kRows]) const {
    const int first_row = item.row_begin + warp_row_;
    if constexpr (kTransformed) transform(p_, rules, first_row, item.kv_head, key, scale_, s);
    if (rules.masks(key)) hide(rules, first_row, key, s);
    const bool raised = state.raise(s, base2_scale_, [&](int i, float outdated) { factor[i] = outdated; });
    state.weigh(s, base2_scale_);
    return raised;
  }

  const AttentionSm90Params& p_;
  const Shared& shared_;
  const int warp_row_;
  const int queries_;  // address of the warpgroup's rows
  float scale_, base2_scale_;
  Ring<1> tiles_;
  Ring<kStages> k_, v_;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kSm90Threads, 1)
    FIC_KERNEL(const __grid_constant__ AttentionSm90Params p) {
  extern __shared__ __align__(1024) char memory[];
  const Shared shared(memory);
  if (threadIdx.x == 0) {
    prefetch_map(p.k_map);
    prefetch_map(p.v_map);
    shared.init_barriers();
  }
  __syncthreads();
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp >= kThreads / 32) {
    give_registers<kLoadRegisters>();
    const int loader = warp - kThreads / 32;
    if (loader == 0) {
      load_keys(p, shared);
    } else if (loader == 1) {
      load_values(p, shared);
    } else {
      load_queries(p, shared, loader - 2);
    }
  } else {
    take_registers<kMultiplyRegisters>();
    Attention(p, shared, warp).run();
  }
}

}  // namespace flashinfer_core::cuda
