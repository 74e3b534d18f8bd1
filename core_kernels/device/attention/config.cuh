// The compile-time parameters of an attention kernel, from the macros of its spec, and what follows from them.
#pragma once

#include "device/attention/params.h"
#include "device/ptx/copy.cuh"
#include "device/ptx/math.cuh"
#include "device/ptx/mma.cuh"

namespace flashinfer_core::cuda {

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);

constexpr int kDimQk = FIC_DIM_QK, kDimVo = FIC_DIM_VO;
constexpr int kQkSteps = (kDimQk + 15) / 16;   // k16 steps of the product q k; columns past the dim are zero
constexpr int kVoGroups = (kDimVo + 15) / 16;  // groups of 16 output columns

constexpr TileShape kTile = {FIC_WARPS_M, FIC_WARPS_KV, FIC_ROWS_PER_WARP, FIC_BLOCK_KEYS, FIC_STAGES};
constexpr int kTeams = FIC_WARPS_KV;  // each with a ring of its own, taking every kTeams-th block of keys
constexpr int kTeamWarps = FIC_WARPS_M;
constexpr int kThreads = kTile.threads();
constexpr int kRowFragments = FIC_ROWS_PER_WARP / 16;
constexpr int kTileRows = kTile.tile_rows();
constexpr int kBlockKeys = FIC_BLOCK_KEYS;
constexpr int kStages = FIC_STAGES;
constexpr int kKeyTiles = kBlockKeys / 8;
static_assert(kTeams == 1 || kTeamWarps == 1, "a team of several warps is the whole CTA");

constexpr bool kDirect = FIC_DIRECT;
constexpr bool kSoftCap = FIC_SOFT_CAP, kAlibi = FIC_ALIBI, kMask = FIC_MASK, kRope = FIC_ROPE;
static_assert(kDirect || !kRope, "rotation happens on the way through registers");
// Scores that are more than a multiple of q k are brought to base 2 before the softmax instead of inside of it.
constexpr bool kTransformed = kSoftCap || kAlibi;

// Number types, by the codes of enum DType: 0 f32, 1 f16, 2 bf16, 3 e4m3, 4 e5m2.
template <int Code>
struct MathOf;
template <>
struct MathOf<1> {
  using Type = HalfMath;
};
template <>
struct MathOf<2> {
  using Type = BFloatMath;
};
using QueryMath = MathOf<FIC_Q_DTYPE>::Type;
constexpr bool kFp8Cache = FIC_KV_DTYPE >= 3;
template <int Code>
struct Fp8Of {
  using Type = E4M3;
};
template <>
struct Fp8Of<4> {
  using Type = E5M2;
};
using Fp8 = Fp8Of<FIC_KV_DTYPE>::Type;
constexpr int kCacheBytes = kFp8Cache ? 1 : 2;      // of an element in the cache
constexpr bool kFp8Shared = kFp8Cache && !kDirect;  // copied as it is; converted after ldmatrix
constexpr int kKvBytes = kFp8Shared ? 1 : 2;        // of an element in shared memory

// The type that is multiplied. Two FP8 numbers become f16 in one instruction and bf16 in four, which would be half of
// all instructions of decode, so with FP8 keys it is f16. bf16 queries go with them as f16 times a power of two of each
// row.
using Math = MathOf<kFp8Shared ? 1 : FIC_Q_DTYPE>::Type;
constexpr bool kScaledQueries = kFp8Shared && FIC_Q_DTYPE == 2;

// Rows in shared memory are whole multiples of 128 bytes, and the 16-byte chunk c of row r stands at c ^ (r % 8), so
// that the eight rows of an ldmatrix hit eight different groups of banks.
constexpr int kQRow = padded_row(kDimQk, 2), kKRow = padded_row(kDimQk, kKvBytes), kVRow = padded_row(kDimVo, kKvBytes);
constexpr int kStageBytes = kBlockKeys * (kKRow + kVRow);
constexpr int kRingBytes = kStages * kStageBytes;  // of one team
constexpr int kQBytes = kTileRows * kQRow;

__device__ inline uint32_t swizzled(int row, int row_bytes, int chunk) {
  return static_cast<uint32_t>(row * row_bytes + ((chunk ^ (row & 7)) << 4));
}

// The same in two steps, so that a lane computes the first once: `lane_base` is a shared-memory address whose lowest
// seven bits are those of swizzled(row, ..., c) with c 0 or 1; `chunk`, a constant, is even or c is 0.
__device__ inline uint32_t at_chunk(uint32_t lane_base, int chunk) {
  return (lane_base ^ static_cast<uint32_t>(chunk % 8 << 4)) + static_cast<uint32_t>(chunk / 8 * 128);
}

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x) % 32; }

// The same number, of which the compiler knows nothing: what is computed from it stays where it is written, and does
// not move ahead of a loop into registers that the loop needs.
__device__ inline int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

__device__ inline int min_of(int a, int b) { return a < b ? a : b; }
__device__ inline int max_of(int a, int b) { return a < b ? b : a; }
__device__ inline int64_t max_of64(int64_t a, int64_t b) { return a < b ? b : a; }

// One item of the schedule: a tile of packed query rows of one KV head, and the chunk of its keys [key_begin, key_end).
struct Item {
  Request request;
  int request_index, kv_head;
  int row_begin;  // first packed row of the tile; row = token * group + head in group
  int key_begin, key_end;
  int chunk, num_chunks;  // this one, and those of this tile that hold keys (at least 1)
  int slot;               // of the tile's first partial state
};

// What the threads of a CTA tell each other about the item in work.
struct Work {
  Item item;
  int num_items, chunk_len;  // of the schedule
  bool done, last;           // no item is left; this one is the last of its tile to arrive
};
static_assert(sizeof(Work) <= kWorkBytes);

__device__ inline int divide(int n, uint32_t magic, uint32_t shift) {
  return magic == 0 ? n : static_cast<int>(__umulhi(static_cast<uint32_t>(n), magic) >> shift);
}

// The token of its request that a packed row belongs to.
__device__ inline int token_of(const AttentionParams& p, int packed) {
  return divide(packed, p.group_magic, p.group_shift);
}

}  // namespace flashinfer_core::cuda
