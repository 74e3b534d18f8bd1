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
// keys were cut, every item leaves a normalized partial output and its log-sum-exp; the item that arrives last merges
// them in the order of the keys, so results do not depend on which CTA did what.
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
#include "device/attention/config.cuh"
#include "device/attention/load.cuh"
#include "device/attention/softmax.cuh"

namespace flashinfer_core::cuda {
namespace {

using Output = float[kRowFragments][2 * kVoGroups][4];

// Q stays in registers where they suffice, and is read again for every block where they do not.
constexpr bool kKeepQueries = kRowFragments == 1 && kDimQk <= 128;

constexpr int kSharedBytes = smem_bytes(kTile, kDimQk, kDimVo, kKvBytes);
constexpr int kResultRow = result_row(kDimVo), kQuads = (kDimVo + 3) / 4;  // of output columns

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

// Some words that one instruction stores.
template <int Count>
struct alignas(4 * Count) Words {
  uint32_t x[Count];
};

// A row of a tile, and where its results go: to the caller's tensors, or to the partial states of the item's chunk.
class ResultRow {
 public:
  __device__ ResultRow(const AttentionParams& p, const Item& item, int row, bool partial)
      : p_(p), item_(item), row_(row), partial_(partial) {
    const int packed = item.row_begin + row, in_request = token_of(p, packed);
    token_ = item.request.q_begin + in_request;
    head_ = item.kv_head * p.group + packed - in_request * p.group;
    exists_ = in_request < item.request.q_len && token_ < p.q_tokens;
    o_ = partial ? reinterpret_cast<char*>(partial_o(item.chunk))
                 : static_cast<char*>(p.o) + (token_ * p.o_stride_token + head_ * p.o_stride_head) * kOutBytes;
  }

  __device__ bool exists() const { return exists_; }

  // Turns the sum of the row's weights and the base-2 logit they are relative to into the factor of its output, and
  // stores its log-sum-exp. A sink counts once, with the first chunk. A row without a visible key gets 0 and -infinity;
  // NaN stays NaN.
  __device__ float close(float top, float sum, bool store_lse) const {
    float rescale = p_.v_scale * (p_.v_scale_ptr == nullptr ? 1.0f : *p_.v_scale_ptr);
    if (p_.sinks != nullptr && item_.chunk == 0) {
      const float sink = p_.sinks[head_] * kLog2E, most = fmaxf(top, sink);
      const float weight = top == -kInfinity ? 0.0f : exp2_fast(top - most);
      sum = sum * weight + (sink == -kInfinity ? 0.0f : exp2_fast(sink - most));
      rescale *= weight;
      top = most;
    }
    if (store_lse) this->store_lse(top, sum);
    return sum > 0.0f ? rescale * reciprocal(sum) : sum * 0.0f;
  }

  __device__ void store_lse(float top, float sum) const {
    const float lse = sum > 0.0f ? top + log2_fast(sum) : sum == 0.0f ? -kInfinity : sum;
    if (partial_) {
      *partial_lse(item_.chunk) = lse;
    } else if (p_.lse != nullptr) {
      p_.lse[token_ * p_.lse_stride_token + head_ * p_.lse_stride_head] = lse;
    }
  }

  // Stores `Count` columns from an even one on; those past the last are left out.
  template <int Count>
  __device__ void store(int column, const float (&x)[Count]) const {
    constexpr bool kWhole = kDimVo % 16 == 0;  // no column is left out, and rows begin at multiples of 16
    if (partial_) {
      store_as<kWhole>(reinterpret_cast<float*>(o_) + column, column, x);
      return;
    }
#if FIC_O_DTYPE == 0
    store_as<kWhole && !kDirect>(reinterpret_cast<float*>(o_) + column, column, x);
#else
    uint32_t packed[Count / 2];
#pragma unroll
    for (int i = 0; i < Count / 2; ++i) packed[i] = MathOf<FIC_O_DTYPE>::Type::pack(x[2 * i], x[2 * i + 1]);
    uint16_t* at = reinterpret_cast<uint16_t*>(o_) + column;
    if constexpr (kWhole && !kDirect) {
      *reinterpret_cast<Words<Count / 2>*>(at) = *reinterpret_cast<const Words<Count / 2>*>(packed);
    } else {
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        if (column + i < kDimVo) at[i] = static_cast<uint16_t>(packed[i / 2] >> i % 2 * 16 & 0xffff);
      }
    }
#endif
  }

  // The partial state of the row that a chunk of its tile left.
  __device__ float* partial_o(int chunk) const { return p_.partial_o + slot_row(chunk) * kDimVo; }
  __device__ float* partial_lse(int chunk) const { return p_.partial_lse + slot_row(chunk); }

 private:
  static constexpr int kOutBytes = FIC_O_DTYPE == 0 ? 4 : 2;

  __device__ int64_t slot_row(int chunk) const { return static_cast<int64_t>(item_.slot + chunk) * kTileRows + row_; }
  template <bool Aligned, int Count>
  static __device__ void store_as(float* at, int column, const float (&x)[Count]) {
    if constexpr (Aligned) {
      *reinterpret_cast<Words<Count>*>(at) = *reinterpret_cast<const Words<Count>*>(x);
    } else {
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        if (column + i < kDimVo) at[i] = x[i];
      }
    }
  }

  const AttentionParams& p_;
  const Item& item_;
  const int row_;
  const bool partial_;
  bool exists_;
  int head_;
  int64_t token_;
  char* o_;
};

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

// Four floats of a partial output from a column on, zeros past its end.
__device__ inline void load_quad(const float* row, int column, bool valid, float (&x)[4]) {
  if constexpr (kDimVo % 4 == 0) {
    const float4 quad = valid ? __ldcg(reinterpret_cast<const float4*>(row + column)) : make_float4(0, 0, 0, 0);
    x[0] = quad.x, x[1] = quad.y, x[2] = quad.z, x[3] = quad.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = valid && column + i < kDimVo ? __ldcg(row + column + i) : 0.0f;
  }
}

// Merges the partial results of a tile's chunks, in order, and writes them. Other CTAs wrote them, so reads go past L1.
// Their latency is what counts: a thread has kBatch chunks under way.
__device__ inline void merge_chunks(const AttentionParams& p, const Item& item) {
  const int n = item.num_chunks;
  constexpr int kBatch = 8;
  for (int index = threadIdx.x; index < kTileRows * kQuads; index += kThreads) {
    const int column = index % kQuads * 4;
    const ResultRow row(p, item, index / kQuads, false);
    if (!row.exists()) continue;
    float top = -kInfinity, sum = 0.0f, x[4] = {};
    for (int first = 0; first < n; first += kBatch) {
      float lse[kBatch], part[kBatch][4], most = top;
#pragma unroll
      for (int c = 0; c < kBatch; ++c) {
        lse[c] = first + c < n ? __ldcg(row.partial_lse(first + c)) : -kInfinity;
        load_quad(row.partial_o(first + c), column, first + c < n, part[c]);
      }
#pragma unroll
      for (int c = 0; c < kBatch; ++c) most = fmaxf(most, lse[c]);
      const float rescale = top == -kInfinity ? 0.0f : exp2_fast(top - most);
      sum *= rescale;
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] *= rescale;
#pragma unroll
      for (int c = 0; c < kBatch; ++c) {
        const float weight = lse[c] == -kInfinity ? 0.0f : exp2_fast(lse[c] - most);
        sum += weight;
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] += weight * part[c][i];
      }
      top = most;
    }
    const float factor = sum > 0.0f ? reciprocal(sum) : sum * 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] *= factor;
    row.store(column, x);
    if (column == 0) row.store_lse(top, sum);
  }
}

// ---- items ---------------------------------------------------------------------------------------------------------

// The last request whose first item is not after `item`, by one warp: 32 probes at a time, the last of which bring the
// request along, since each step costs the latency of memory.
__device__ inline int find_request(const AttentionParams& p, int item, Request* request) {
  constexpr uint32_t kAll = 0xffffffffu;
  int first = 0, count = p.num_requests;
  while (count > 32) {
    const int step = (count + 31) / 32, at = first + lane_id() * step;
    const bool reached = lane_id() * step < count && p.requests[at].first_item <= item;
    const int last = 31 - __clz(__ballot_sync(kAll, reached));
    first += last * step;
    count = min_of(step, count - last * step);
  }
  const Request mine = p.requests[first + min_of(lane_id(), count - 1)];
  const int last = 31 - __clz(__ballot_sync(kAll, lane_id() < count && mine.first_item <= item));
  request->kv_begin = __shfl_sync(kAll, mine.kv_begin, last);
  request->q_begin = __shfl_sync(kAll, mine.q_begin, last);
  request->q_len = __shfl_sync(kAll, mine.q_len, last);
  request->kv_len = __shfl_sync(kAll, mine.kv_len, last);
  request->num_chunks = __shfl_sync(kAll, mine.num_chunks, last);
  request->first_item = __shfl_sync(kAll, mine.first_item, last);
  request->first_slot = __shfl_sync(kAll, mine.first_slot, last);
  return first + last;
}

// The first item of a CTA is its own number, the others come from the counter.
__device__ inline int claim(const AttentionParams& p) {
  return static_cast<int>(gridDim.x) + atomicAdd(&p.schedule->next_item, 1);
}

// Where an item's rows and keys are. One whose chunk is not below num_chunks holds no key that others do not.
__device__ inline Item locate_item(const AttentionParams& p, int index, int chunk_len) {
  Item item;
  item.request_index = find_request(p, index, &item.request);
  const Request& request = item.request;
  const int rows = request.q_len * p.group, tiles = (rows + kTileRows - 1) / kTileRows;
  int rest = index - request.first_item;
  item.kv_head = rest / (tiles * request.num_chunks);
  rest -= item.kv_head * tiles * request.num_chunks;
  // With causal masks the last tile sees the most keys: it goes first, so that the short ones fill the gaps at the end.
  const int tile = tiles - 1 - rest / request.num_chunks;
  item.chunk = rest % request.num_chunks;
  item.slot = request.first_slot + (item.kv_head * tiles + tile) * request.num_chunks;
  item.row_begin = tile * kTileRows;

  const int offset = request.kv_len - request.q_len;  // token i of the request stands at position i + offset
  const int last_row = min_of(item.row_begin + kTileRows, rows) - 1;
  const int begin = p.window_left < 0 ? 0 : max_of(0, token_of(p, item.row_begin) + offset - p.window_left);
  int end = p.causal ? min_of(request.kv_len, token_of(p, last_row) + offset + 1) : request.kv_len;
  end = max_of(end, begin);
  item.num_chunks = 1;
  item.key_begin = begin, item.key_end = end;
  if (request.num_chunks > 1) {  // chunks count from the first key that the tile sees
    item.num_chunks = max_of(1, (end - begin + chunk_len - 1) / chunk_len);
    item.key_begin = begin + item.chunk * chunk_len;
    item.key_end = min_of(end, item.key_begin + chunk_len);
  }
  return item;
}

// Finds the item of a claimed number, or one claimed after it if that is empty. For the first warp.
__device__ inline void find_item(const AttentionParams& p, int index, Work& work) {
  Item item{};
  __syncwarp();
  while (true) {
    index = __shfl_sync(0xffffffffu, index, 0);
    if (index >= work.num_items) break;
    item = locate_item(p, index, work.chunk_len);
    if (item.chunk < item.num_chunks) break;
    if (lane_id() == 0) index = claim(p);
  }
  if (lane_id() == 0) {
    work.item = item;
    work.done = index >= work.num_items;
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
  const uint32_t queries = shared_address(shared), ring = queries + kQBytes + team * kRingBytes;
  constexpr int kStep = kTeams * kBlockKeys;
  const int first_row = item.row_begin + warp_row, first_key = item.key_begin + team * kBlockKeys;
  const int num_blocks = first_key < item.key_end ? (item.key_end - first_key + kStep - 1) / kStep : 0;

  BlockLoader loader(p, item, ring, warp_row / FIC_ROWS_PER_WARP * BlockLoader::kKeys);
  loader.look_up(first_key);
  load_queries(p, item, queries);
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
    if constexpr (kTransformed) transform(p, rules, first_row, item.kv_head, key, scale, s);
    if (rules.masks(key)) hide(rules, first_row, key, s);
    state.update(s, kTransformed ? 1.0f : scale * kLog2E, o);
    multiply_values(values, s, o);
  }
  if (num_blocks < 3 && threadIdx.x == 0) next = claim(p);
  if constexpr (!kDirect) cp_async_wait<0>();
}

// Counts an item of a tile whose keys were cut, once its partial state is written; the last one merges.
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
    merge_chunks(p, item);
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
    } else {
      write_rows(p, work.item, warp_row, logit_scale, state, o);
    }
    if (work.item.num_chunks > 1) arrive(p, work.item, work);
    __syncthreads();  // the item and the results are free
  }
  if (threadIdx.x == 0 && atomicAdd(&p.schedule->finished_ctas, 1) == static_cast<int>(gridDim.x) - 1) {
    p.schedule->next_item = 0;
    p.schedule->finished_ctas = 0;
  }
}

}  // namespace flashinfer_core::cuda
