// The universal attention kernel: every GPU from SM75 on, every layout of keys, decode to long prefill.
//
// Tile. Rows pack the query heads of a KV head: row = token * group + head in group, so a decode step of a group of 8
// is 8 rows of the 16 that mma.sync works on, and keys are read once for the group. Few rows (decode): every warp is a
// team of its own that walks its share of the chunk's keys through a private cp.async ring, without a barrier between
// warps, and the warps' results are merged at the end. Many rows (prefill): the warps split the rows and share the
// ring. 32 rows a warp instead of 16 halve the bytes that ldmatrix reads from shared memory for each product: with 16
// rows that, and not the tensor cores, is the bound.
//
// Grid. CTAs take items (request, KV head, tile, chunk of keys) from the schedule until none is left. Of a tile whose
// keys were cut, every item leaves a normalized partial output and its log-sum-exp. They are merged in the order of the
// keys, so results do not depend on which CTA did what: tiles of few rows by the item that arrives last, others by the
// kernel of merge_chunks.cuh, since one CTA would take 40 us for 128 rows of 16 chunks.
//
// Roofline. Decode reads each key and value once: 2 * dim * bytes for 4 * dim * group operations, far below what the
// tensor cores need (about 200 a byte), so DRAM bounds it. Prefill of a tile of 128 rows does 128 * 4 * dim operations
// for each key and value it reads from L2: mma.sync bounds it, at about 0.6 of the rate that wgmma reaches on SM90.
//
// Measured on one H200 (bf16, head_dim 128, 32 / 8 heads): decode of 128 x 8,192 keys at 0.96 of what reading alone
// reaches, 64 x 2,048 at 0.88; prefill 4 x 4,096 at 340 to 360 TFLOP/s, tensor pipe 52 %, shared memory 49 % busy.
// Each scheduler has two warps, since 255 registers are taken, and a third of their time they wait for an instruction
// of their own with nothing else to issue: latency, not a pipe, is the bound. What was tried and lost in prefill: 16
// rows a warp (shared memory then bounds), blocks of 32 and 48 keys (each block costs a barrier and a row maximum),
// one stage, rescaling in every block instead of when a maximum moved (7 %), copies issued after the product q k
// (nothing), starting the next item's copies before the results are written (nothing), and writing results by way of
// shared memory (8 us a tile: few warps, long chains). In decode: chunks of half or a quarter of a CTA's share, and
// claiming items early.
#include "device/attention/items.cuh"
#include "device/attention/load.cuh"
#include "device/attention/results.cuh"
#include "device/attention/softmax.cuh"

namespace flashinfer_core::cuda {
namespace {

using Output = float[kRowFragments][2 * kVoGroups][4];

// Q stays in registers where they suffice, and is read again for every block where they do not.
constexpr bool kKeepQueries = kRowFragments == 1 && kDimQk <= 128;

constexpr int kSharedBytes = smem_bytes(kTile, kDimQk, kDimVo, kKvBytes);
constexpr int kResultRow = result_row(kDimVo);
static_assert(kChunkKeys % (kTeams * kBlockKeys) == 0, "chunks would end within blocks");

// ---- products ------------------------------------------------------------------------------------------------------

// What a lane adds to the address of queries, keys and values for its rows of an ldmatrix.
__device__ inline uint32_t query_lane() { return swizzled(lane_id() % 16, kQRow, lane_id() / 16); }
__device__ inline uint32_t key_lane() {
  const int lane = lane_id();
  return kFp8Shared ? swizzled(lane % 16, kKRow, 0) : swizzled(lane / 16 * 8 + lane % 8, kKRow, lane / 8 % 2);
}
__device__ inline uint32_t value_lane() { return swizzled(lane_id() % 16, kVRow, kFp8Shared ? 0 : lane_id() / 16); }

__device__ inline void load_q(uint32_t queries, int step, uint32_t (&a)[kRowFragments][4]) {
#pragma unroll
  for (int m = 0; m < kRowFragments; ++m) ldmatrix_x4(a[m], at_chunk(queries, 2 * step) + m * 16 * kQRow);
}

// A negative scale would turn the maximum of the scores into their minimum, so it is the queries that change sign.
__device__ inline void negate_queries(char* queries) {
  uint32_t* words = reinterpret_cast<uint32_t*>(queries);
  for (int i = threadIdx.x; i < kQBytes / 4; i += kThreads) words[i] ^= 0x80008000u;
}

// s += q k over one step of 16 columns.
__device__ inline void multiply_keys(uint32_t keys, int step, const uint32_t (&a)[kRowFragments][4], Scores& s) {
#pragma unroll
  for (int n = 0; n < kKeyTiles; n += 2) {
    uint32_t b[4];  // two B operands
    if constexpr (kFp8Shared) {
      uint32_t raw[2];
      ldmatrix_x2(raw, at_chunk(keys, step) + n * 8 * kKRow);
      unpack_fp8<Math, Fp8>(raw[0], b[0], b[1]);
      unpack_fp8<Math, Fp8>(raw[1], b[2], b[3]);
    } else {
      ldmatrix_x4(b, at_chunk(keys, 2 * step) + n * 8 * kKRow);
    }
#pragma unroll
    for (int m = 0; m < kRowFragments; ++m) {
      Math::mma(s[m][n], a[m], b[0], b[1]);
      Math::mma(s[m][n + 1], a[m], b[2], b[3]);
    }
  }
}

// o += weights v. With an FP8 cache, output fragments 2 j and 2 j + 1 hold the even and the odd columns of group j.
__device__ inline void multiply_values(uint32_t values, const Scores& s, Output& o) {
#pragma unroll
  for (int step = 0; step < kKeyTiles / 2; ++step) {
    uint32_t a[kRowFragments][4];
#pragma unroll
    for (int m = 0; m < kRowFragments; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&pair)[4] = s[m][2 * step + i / 2];
        a[m][i] = Math::pack(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
      }
    }
#pragma unroll
    for (int j = 0; j < kVoGroups; ++j) {
      uint32_t b[4];
      if constexpr (kFp8Shared) {
        uint32_t raw[2], odd_even[2][2];
        ldmatrix_x2_trans(raw, at_chunk(values, j) + step * 16 * kVRow);
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // bytes: key, column 00 01 10 11 -> 00 10 01 11
          unpack_fp8<Math, Fp8>(__byte_perm(raw[i], 0, 0x3120), odd_even[i][0], odd_even[i][1]);
        }
        b[0] = odd_even[0][0], b[1] = odd_even[1][0], b[2] = odd_even[0][1], b[3] = odd_even[1][1];
      } else {
        ldmatrix_x4_trans(b, at_chunk(values, 2 * j) + step * 16 * kVRow);
      }
#pragma unroll
      for (int m = 0; m < kRowFragments; ++m) {
        Math::mma(o[m][2 * j], a[m], b[0], b[1]);
        Math::mma(o[m][2 * j + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// ---- results -------------------------------------------------------------------------------------------------------

// Writes what a warp holds of its rows: prefill, where no other warp has a part of them. Straight from the registers:
// with four warps, a loop over whole rows in shared memory took 8 us a tile longer than these narrow stores.
__device__ inline void write_rows(const AttentionParams& p, const Item& item, int warp_row, float scale,
                                  const RowState& state, const Output& o) {
  const int gr = lane_id() / 4, tq = lane_id() % 4;
#pragma unroll
  for (int i = 0; i < RowRules::kRows; ++i) {
    const float sum = state.total(i);
    const ResultRow row(p, item, warp_row + i / 2 * 16 + i % 2 * 8 + gr, item.num_chunks > 1);
    if (!row.exists()) continue;
    const float factor = row.close(state.logit(i, scale), sum, tq == 0);
    const int e = i % 2 * 2;
#pragma unroll
    for (int j = 0; j < kVoGroups; ++j) {
      const float (&a)[4] = o[i / 2][2 * j], (&b)[4] = o[i / 2][2 * j + 1];
      if constexpr (kFp8Shared) {
        row.store<4>(16 * j + 4 * tq, {a[e] * factor, b[e] * factor, a[e + 1] * factor, b[e + 1] * factor});
      } else {
        row.store<2>(16 * j + 2 * tq, {a[e] * factor, a[e + 1] * factor});
        row.store<2>(16 * j + 8 + 2 * tq, {b[e] * factor, b[e + 1] * factor});
      }
    }
  }
}

// Merges the teams' results of the tile's rows by way of shared memory, and writes them: decode.
__device__ inline void combine_teams(const AttentionParams& p, const Item& item, char* shared, int team, float scale,
                                     const RowState& state, const Output& o) {
  float* rows = reinterpret_cast<float*>(shared);
  float2* tops = reinterpret_cast<float2*>(rows + kTeams * kTileRows * kResultRow);  // base-2 maximum, and sum
  const int gr = lane_id() / 4, tq = lane_id() % 4;
#pragma unroll
  for (int i = 0; i < RowRules::kRows; ++i) {
    const int row = team * kTileRows + i / 2 * 16 + i % 2 * 8 + gr, e = i % 2 * 2;
    const float sum = state.total(i);
    if (tq == 0) tops[row] = make_float2(state.logit(i, scale), sum);
    float* at = rows + row * kResultRow;
#pragma unroll
    for (int j = 0; j < kVoGroups; ++j) {
      const float (&a)[4] = o[i / 2][2 * j], (&b)[4] = o[i / 2][2 * j + 1];
      if constexpr (kFp8Shared) {
        *reinterpret_cast<float4*>(at + 16 * j + 4 * tq) = make_float4(a[e], b[e], a[e + 1], b[e + 1]);
      } else {
        *reinterpret_cast<float2*>(at + 16 * j + 2 * tq) = make_float2(a[e], a[e + 1]);
        *reinterpret_cast<float2*>(at + 16 * j + 8 + 2 * tq) = make_float2(b[e], b[e + 1]);
      }
    }
  }
  __syncthreads();
  for (int index = threadIdx.x; index < kTileRows * kQuads; index += kThreads) {
    const int row = index / kQuads, column = index % kQuads * 4;
    const ResultRow result(p, item, row, item.num_chunks > 1);
    if (!result.exists()) continue;
    float top = -kInfinity, sum = 0.0f, x[4] = {};
#pragma unroll
    for (int t = 0; t < kTeams; ++t) top = fmaxf(top, tops[t * kTileRows + row].x);
#pragma unroll
    for (int t = 0; t < kTeams; ++t) {
      const float2 part = tops[t * kTileRows + row];
      const float weight = part.x == -kInfinity ? part.y * 0.0f : exp2_fast(part.x - top);  // NaN stays NaN
      const float4 quad = *reinterpret_cast<const float4*>(rows + (t * kTileRows + row) * kResultRow + column);
      sum += weight * part.y;
      x[0] += weight * quad.x, x[1] += weight * quad.y, x[2] += weight * quad.z, x[3] += weight * quad.w;
    }
    const float factor = result.close(top, sum, column == 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] *= factor;
    result.store(column, x);
  }
}

// ---- the walk over the keys ----------------------------------------------------------------------------------------

// Waits until the team's copies into a stage are there for all its lanes, and its last reads of the stage before.
__device__ inline void team_sync() {
  if constexpr (kTeams > 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// Walks the keys of an item. Near the end thread 0 claims the next one: early enough to hide the latency, and so late
// that a CTA that is done first gets it.
__device__ inline void attend(const AttentionParams& p, const Item& item, int team, int warp_row, char* shared,
                              float scale, bool negate, int& next, RowState& state, Output& o) {
  float* factors = reinterpret_cast<float*>(shared + kSharedBytes - kWorkBytes) - kTileRows;  // of scaled queries
  const uint32_t queries = shared_address(shared), ring = queries + kQBytes + team * kRingBytes;
  constexpr int kStep = kTeams * kBlockKeys;
  const int first_row = item.row_begin + warp_row, first_key = item.key_begin + team * kBlockKeys;
  const int num_blocks = first_key < item.key_end ? (item.key_end - first_key + kStep - 1) / kStep : 0;

  BlockLoader loader(p, item, ring, warp_row / FIC_ROWS_PER_WARP * BlockLoader::kKeys);
  loader.look_up(first_key);
  load_queries(p, item, queries, factors);
  if constexpr (!kDirect) cp_async_commit();
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < num_blocks) loader.issue(i, first_key + i * kStep);
    if constexpr (!kDirect) cp_async_commit();
  }
  if constexpr (!kDirect) cp_async_wait<kStages - 1>();
  __syncthreads();
  if (negate) {
    negate_queries(shared);
    __syncthreads();
  }
  const uint32_t lane_queries = queries + warp_row * kQRow + query_lane();
  const uint32_t lane_keys = ring + key_lane(), lane_values = ring + kBlockKeys * kKRow + value_lane();
  uint32_t q[kKeepQueries ? kQkSteps : 1][kRowFragments][4];
  if constexpr (kKeepQueries) {
#pragma unroll
    for (int step = 0; step < kQkSteps; ++step) load_q(lane_queries, step, q[step]);
  }

  float unscale[RowRules::kRows];
  if constexpr (kScaledQueries) {
#pragma unroll
    for (int i = 0; i < RowRules::kRows; ++i) unscale[i] = factors[warp_row + i / 2 * 16 + i % 2 * 8 + lane_id() / 4];
  }

  const RowRules rules(p, item, warp_row);
  int stage = 0;
  for (int block = 0; block < num_blocks; ++block) {
    const int key = first_key + block * kStep;
    if constexpr (kStages == 1) {
      team_sync();
      loader.issue(0, key);
      if constexpr (!kDirect) cp_async_commit(), cp_async_wait<0>();
      team_sync();
    } else {
      if constexpr (!kDirect) cp_async_wait<kStages - 2>();
      team_sync();
      const int free_stage = stage == 0 ? kStages - 1 : stage - 1;
      if (block + kStages - 1 < num_blocks) loader.issue(free_stage, key + (kStages - 1) * kStep);
      if constexpr (!kDirect) cp_async_commit();
    }
    if (block == num_blocks - 3 && threadIdx.x == 0) next = claim(p);
    const uint32_t keys = lane_keys + stage * kStageBytes, values = lane_values + stage * kStageBytes;
    stage = stage + 1 == kStages ? 0 : stage + 1;
    if (rules.skips(key)) continue;

    Scores s = {};
#pragma unroll
    for (int step = 0; step < kQkSteps; ++step) {
      if constexpr (kKeepQueries) {
        multiply_keys(keys, step, q[step], s);
      } else {
        load_q(lane_queries, step, q[0]);
        multiply_keys(keys, step, q[0], s);
      }
    }
    if constexpr (kScaledQueries) rescale(unscale, s);
    if constexpr (kTransformed) transform(p, rules, first_row, item.kv_head, key, scale, s);
    if (rules.masks(key)) hide(rules, first_row, key, s);
    state.update(s, kTransformed ? 1.0f : scale * kLog2E, o);
    multiply_values(values, s, o);
  }
  if (num_blocks < 3 && threadIdx.x == 0) next = claim(p);
  if constexpr (!kDirect) cp_async_wait<0>();
}

// Counts an item of a tile whose keys were cut, once its partial state is written; the last one merges: decode, where a
// tile has few rows, and a kernel of its own would cost more than the merging.
__device__ inline void arrive(const AttentionParams& p, const Item& item, Work& work) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    int32_t* arrivals = &p.arrivals[item.slot];
    work.last = atomicAdd(arrivals, 1) == item.num_chunks - 1;
    if (work.last) *arrivals = 0;
  }
  __syncthreads();
  if (work.last) {
    __threadfence();
    merge_rows<kThreads>(p, item, 0, kTileRows);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, FIC_MIN_CTAS)
    FIC_KERNEL(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) char shared[];
  Work& work = *reinterpret_cast<Work*>(shared + kSharedBytes - kWorkBytes);
  const int warp = threadIdx.x / 32;
  const int team = kTeams > 1 ? warp : 0, warp_row = kTeams > 1 ? 0 : warp * FIC_ROWS_PER_WARP;
  float scale = p.sm_scale;
  if (p.q_scale_ptr != nullptr) scale *= *p.q_scale_ptr;
  if (p.k_scale_ptr != nullptr) scale *= *p.k_scale_ptr;
  const bool negate = scale < 0.0f;
  scale = fabsf(scale);
  const float logit_scale = kTransformed ? 1.0f : scale * kLog2E;
  if (warp == 0) prefetch(p.requests + static_cast<int64_t>(lane_id()) * p.num_requests / 32);
  if (threadIdx.x == 0) work.num_items = p.schedule->num_items, work.chunk_len = p.schedule->chunk_len;
  int next = blockIdx.x;
  while (true) {
    if (warp == 0) find_item(p, next, work);
    __syncthreads();
    if (work.done) break;
    RowState state;
    Output o = {};
    attend(p, work.item, team, warp_row, shared, scale, negate, next, state, o);
    __syncthreads();  // queries and rings are free
    if constexpr (kTeams > 1) {
      combine_teams(p, work.item, shared, team, logit_scale, state, o);
      if (work.item.num_chunks > 1) arrive(p, work.item, work);
    } else {
      write_rows(p, work.item, warp_row, logit_scale, state, o);
    }
    __syncthreads();  // the item and the results are free
  }
  if (threadIdx.x == 0 && atomicAdd(&p.schedule->finished_ctas, 1) == static_cast<int>(gridDim.x) - 1) {
    p.schedule->next_item = 0;
    p.schedule->finished_ctas = 0;
  }
}

}  // namespace flashinfer_core::cuda
