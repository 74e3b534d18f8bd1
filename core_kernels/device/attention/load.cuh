// The way of queries, keys and values into shared memory.
//
// Keys and values go by 16-byte cp.async where the layout of the caller's tensors allows it. FIC_DIRECT kernels take
// them through registers instead, element by element: for tensors whose rows do not begin at multiples of 16 bytes, for
// rotation on load, and for GPUs before SM80. FP8 caches stay FP8 in shared memory in the first case and become 16-bit
// on the way in the second.
#pragma once

#include "device/attention/config.cuh"
#include "device/attention/status.cuh"

namespace flashinfer_core::cuda {

// Where a key is: lane i of a warp keeps that of the i-th key which the warp loads next.
struct Place {
  int page, slot;
};

// Keys at and past key_end have page -1 and are filled with zeros. A page outside of the cache is reported, and read as
// page 0: the call after this one raises.
__device__ inline Place locate(const AttentionParams& p, const Item& item, int key) {
  if (key >= item.key_end) return {-1, 0};
  int64_t page = item.request.kv_begin;
  int slot = 0;
  if (p.page_table == nullptr) {
    page += key;
  } else {
    const int index = divide(key, p.page_magic, p.page_shift);
    slot = key - index * p.page_size;
    page += index;
    page = page < p.page_table_size ? p.page_table[page] : -1;
  }
  if (page < 0 || page >= p.num_pages) {
    report(p.status, Fault::page, item.request_index, page);
    page = 0;
  }
  return {static_cast<int>(page), slot};
}

// ---- the fast way: 16-byte copies ----------------------------------------------------------------------------------

// Copies Rows rows of Dim elements; lane i holds the byte offset of row i, and the first num_valid rows exist. Eight
// lanes copy 128 bytes of a row at a time: whole sectors, and few addresses to compute. `copy(row, a, b, source,
// valid)` copies chunk a + b, b a multiple of 8, or writes zeros.
template <int Dim, int Bytes, int Rows, class Copy>
__device__ inline void for_each_chunk(const char* base, int64_t offset, int num_valid, Copy copy) {
  constexpr int kChunks = (Dim + 15) / 16 * 16 * Bytes / 16;  // of a row, those that only pad included
  constexpr int kLanes = kChunks < 8 ? kChunks : 8, kStep = 32 / kLanes;
  const int lane = opaque(lane_id()), row_of_lane = lane / kLanes, chunk_of_lane = lane % kLanes;
#pragma unroll
  for (int first = 0; first < Rows; first += kStep) {
    const int row = first + row_of_lane;
    const char* source = base + __shfl_sync(0xffffffffu, offset, row) + chunk_of_lane * 16;
    if ((Rows % kStep != 0 || 32 % kLanes != 0) && (row >= Rows || row_of_lane >= kStep)) continue;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk += kLanes) {
      const int at = chunk + chunk_of_lane;
      if (kChunks % kLanes != 0 && at >= kChunks) continue;
      copy(row, chunk_of_lane, chunk, source + chunk * 16, row < num_valid && (Dim % 16 == 0 || at * 16 < Dim * Bytes));
    }
  }
}

template <int Dim, int Bytes, int RowBytes, int Rows>
__device__ inline void copy_rows(uint32_t shared, int first_row, const char* base, int64_t offset, int num_valid) {
  for_each_chunk<Dim, Bytes, Rows>(
      base, offset, num_valid, [&](int row, int lane_chunk, int chunk, const char* source, bool valid) {
        cp_async_16(shared + swizzled(first_row + row, RowBytes, lane_chunk) + chunk * 16, source, valid);
      });
}

// ---- the general way: through registers ----------------------------------------------------------------------------

// Element x of a cache as a float.
__device__ inline float load_cached(const char* x) {
  if constexpr (kFp8Cache) {
    return HalfMath::unpack(static_cast<uint16_t>(Fp8::to_half2(*reinterpret_cast<const uint8_t*>(x)) & 0xffff));
  } else {
    return Math::unpack(*reinterpret_cast<const uint16_t*>(x));
  }
}

__device__ inline void store_element(uint32_t shared, int row, int row_bytes, int column, float x) {
  const uint16_t bits = static_cast<uint16_t>(Math::pack(x, 0.0f) & 0xffff);
  store_shared(shared + swizzled(row, row_bytes, column / 8) + column % 8 * 2, bits);
}

// Rotates the pair (x, y) = elements (i, i + dim / 2) at a position, which is negative where a request has more queries
// than keys.
__device__ inline void rotate(const AttentionParams& p, int64_t position, int i, float& x, float& y) {
  int64_t at = position < 0 ? -position : position;
  at = at < p.rope_positions ? at : p.rope_positions - 1;
  const float* row = p.rope_cos_sin + at * kDimQk;
  const float cosine = row[i], sine = position < 0 ? -row[i + kDimQk / 2] : row[i + kDimQk / 2], x0 = x;
  x = x0 * cosine - y * sine;
  y = y * cosine + x0 * sine;
}

// Writes one row of `Dim` elements, zeros up to a multiple of 16. `load(i)` gives an element.
template <int Dim, int RowBytes, bool Rotate, class Load>
__device__ inline void store_row(const AttentionParams& p, uint32_t shared, int row, bool valid, int64_t position,
                                 Load load) {
  constexpr int kColumns = (Dim + 15) / 16 * 16;
  if constexpr (Rotate) {
    constexpr int kHalf = Dim / 2;
    for (int i = lane_id(); i < kHalf; i += 32) {
      float x = valid ? load(i) : 0.0f, y = valid ? load(i + kHalf) : 0.0f;
      if (valid) rotate(p, position, i, x, y);
      store_element(shared, row, RowBytes, i, x);
      store_element(shared, row, RowBytes, i + kHalf, y);
    }
    for (int i = Dim + lane_id(); i < kColumns; i += 32) store_element(shared, row, RowBytes, i, 0.0f);
  } else {
    for (int i = lane_id(); i < kColumns; i += 32) {
      store_element(shared, row, RowBytes, i, valid && i < Dim ? load(i) : 0.0f);
    }
  }
}

template <int Dim, int RowBytes, bool Rotate, int Keys>
__device__ inline void convert_rows(const AttentionParams& p, uint32_t shared, int first_row, const char* base,
                                    int64_t page_bytes, int64_t slot_bytes, Place place, int first_key) {
  for (int key = 0; key < Keys; ++key) {
    const int page = __shfl_sync(0xffffffffu, place.page, key);
    const int slot = __shfl_sync(0xffffffffu, place.slot, key);
    const char* row = base + (page < 0 ? 0 : page * page_bytes + slot * slot_bytes);
    store_row<Dim, RowBytes, Rotate>(p, shared, first_row + key, page >= 0, first_key + key,
                                     [&](int i) { return load_cached(row + i * kCacheBytes); });
  }
}

// ---- a block of keys and values ------------------------------------------------------------------------------------

// Loads the blocks of one team, in order, into its ring. Every warp of the team loads its share of each block's rows.
class BlockLoader {
 public:
  static constexpr int kKeys = kBlockKeys / kTeamWarps;  // rows of a block that one warp loads
  static_assert(kKeys * kTeamWarps == kBlockKeys && kKeys <= 32, "the lanes of a warp hold the places of its keys");

  __device__ BlockLoader(const AttentionParams& p, const Item& item, uint32_t ring, int first_row)
      : p_(p), item_(item), ring_(ring), first_row_(first_row) {}

  // Looks up the places of the warp's rows of a block that begins at a key.
  __device__ void look_up(int block_key) {
    place_ = lane_id() < kKeys ? locate(p_, item_, block_key + first_row_ + lane_id()) : Place{-1, 0};
  }

  // Starts the copies of the block that was looked up into a stage, then looks up the team's next, whose latency passes
  // behind the arithmetic.
  __device__ void issue(int stage, int block_key) {
    const int first_key = block_key + first_row_;
    const char* k = static_cast<const char*>(p_.k) + item_.kv_head * p_.k_stride_head * kCacheBytes;
    const char* v = static_cast<const char*>(p_.v) + item_.kv_head * p_.v_stride_head * kCacheBytes;
    const uint32_t k_shared = ring_ + stage * kStageBytes, v_shared = k_shared + kBlockKeys * kKRow;
    const int64_t k_page = p_.k_stride_page * kCacheBytes, k_slot = p_.k_stride_slot * kCacheBytes;
    const int64_t v_page = p_.v_stride_page * kCacheBytes, v_slot = p_.v_stride_slot * kCacheBytes;
    if constexpr (kDirect) {
      convert_rows<kDimQk, kKRow, kRope, kKeys>(p_, k_shared, first_row_, k, k_page, k_slot, place_, first_key);
      convert_rows<kDimVo, kVRow, false, kKeys>(p_, v_shared, first_row_, v, v_page, v_slot, place_, first_key);
    } else {
      // What is not copied is not read, whatever its address. That a row exists is told by its number: told by the sign
      // of its offset, decode with FP8 keys was 7 % slower.
      const int page = max_of(place_.page, 0);
      const int64_t k_offset = page * k_page + place_.slot * k_slot;
      const int64_t v_offset = page * v_page + place_.slot * v_slot;
      const int num_valid = p_.num_pages > 0 ? item_.key_end - first_key : 0;
      copy_rows<kDimQk, kKvBytes, kKRow, kKeys>(k_shared, first_row_, k, k_offset, num_valid);
      copy_rows<kDimVo, kKvBytes, kVRow, kKeys>(v_shared, first_row_, v, v_offset, num_valid);
    }
    look_up(block_key + kTeams * kBlockKeys);
  }

 private:
  const AttentionParams& p_;
  const Item& item_;
  const uint32_t ring_;
  const int first_row_;
  Place place_;
};

// ---- queries -------------------------------------------------------------------------------------------------------

// For FP8 keys a lane gets four neighbouring elements of K where the product wants two pairs eight apart, so the
// columns of Q are permuted alike: the pair of columns 4 t + 2 h stands at 2 t + 8 h. `half` tells which eight of
// sixteen.
__device__ inline void store_permuted(uint32_t shared, int row, int step, int half, uint4 x) {
  store_shared(shared + swizzled(row, kQRow, 2 * step) + 8 * half, make_uint2(x.x, x.z));
  store_shared(shared + swizzled(row, kQRow, 2 * step + 1) + 8 * half, make_uint2(x.y, x.w));
}

// Writes a row of bf16 queries as f16, brought to at most 2 by a power of two. What is below 2^-24 of the row's largest
// element loses bits, less than the sums of float32 lose. Lane i has chunk i of the row. Returns the factor that undoes
// it.
__device__ inline float store_scaled(uint32_t shared, int row, uint4 x) {
  const uint32_t words[4] = {x.x, x.y, x.z, x.w};
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    largest = max(largest, max(words[i] & 0x7fffu, words[i] >> 16 & 0x7fffu));
  }
  largest = __reduce_max_sync(0xffffffffu, largest);
  const uint32_t exponent = min(max(largest >> 7, 1u), 253u);  // NaN and infinity stay what they are
  const float scale = __uint_as_float((254u - exponent) << 23);
  uint32_t scaled[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    scaled[i] = Math::pack(bf16_to_float(static_cast<uint16_t>(words[i] & 0xffffu)) * scale,
                           bf16_to_float(static_cast<uint16_t>(words[i] >> 16)) * scale);
  }
  if (lane_id() < 2 * kQkSteps) {
    store_permuted(shared, row, lane_id() / 2, lane_id() % 2, make_uint4(scaled[0], scaled[1], scaled[2], scaled[3]));
  }
  return __uint_as_float(exponent << 23);
}

// The byte offset of a packed row in q.
__device__ inline int64_t query_offset(const AttentionParams& p, const Item& item, int packed) {
  const int in_request = token_of(p, packed), head = item.kv_head * p.group + packed - in_request * p.group;
  return ((static_cast<int64_t>(item.request.q_begin) + in_request) * p.q_stride_token + head * p.q_stride_head) * 2;
}

// Packed rows of the item's request that q has; fewer than the schedule wants is a fault.
__device__ inline int num_query_rows(const AttentionParams& p, const Item& item) {
  const int64_t tokens = p.q_tokens - item.request.q_begin;
  if (tokens >= item.request.q_len) return item.request.q_len * p.group;
  report(p.status, Fault::query_rows, item.request_index, item.request.q_begin + item.request.q_len);
  return static_cast<int>(max_of64(tokens, 0)) * p.group;
}

// Brings this warp's share of the tile's packed rows into shared memory, and the factors of scaled ones; rows past the
// request are zero. Copies may still be under way at the return: they belong to the thread's next group of cp.async.
__device__ inline void load_queries(const AttentionParams& p, const Item& item, uint32_t shared, float* factors) {
  constexpr int kRows = kTileRows / (kThreads / 32);
  static_assert(kRows <= 32, "the lanes of a warp hold the offsets of its rows");
  const char* q = static_cast<const char*>(p.q);
  const int first_row = static_cast<int>(threadIdx.x) / 32 * kRows, first_packed = item.row_begin + first_row;
  const int num_valid = num_query_rows(p, item) - first_packed;
  const int64_t offset = lane_id() < num_valid ? query_offset(p, item, first_packed + lane_id()) : 0;
  if constexpr (kDirect) {
    for (int row = 0; row < kRows; ++row) {
      const char* source = q + __shfl_sync(0xffffffffu, offset, row);
      const int64_t position =
          token_of(p, first_packed + row) + static_cast<int64_t>(item.request.kv_len) - item.request.q_len;
      store_row<kDimQk, kQRow, kRope>(p, shared, first_row + row, row < num_valid, position, [&](int i) {
        return QueryMath::unpack(*reinterpret_cast<const uint16_t*>(source + i * 2));
      });
    }
  } else if constexpr (kScaledQueries) {
#pragma unroll 4
    for (int row = 0; row < kRows; ++row) {
      const char* source = q + __shfl_sync(0xffffffffu, offset, row) + lane_id() * 16;
      const bool exists = row < num_valid && lane_id() * 16 < kDimQk * 2;
      const uint4 x = exists ? *reinterpret_cast<const uint4*>(source) : make_uint4(0, 0, 0, 0);
      const float factor = store_scaled(shared, first_row + row, x);
      if (lane_id() == 0) factors[first_row + row] = factor;
    }
  } else if constexpr (kFp8Shared) {
    for_each_chunk<kDimQk, 2, kRows>(
        q, offset, num_valid, [&](int row, int lane_chunk, int chunk, const char* source, bool valid) {
          const uint4 x = valid ? *reinterpret_cast<const uint4*>(source) : make_uint4(0, 0, 0, 0);
          const int at = lane_chunk + chunk;
          store_permuted(shared, first_row + row, at / 2, at % 2, x);
        });
  } else {
    copy_rows<kDimQk, 2, kQRow, kRows>(shared, first_row, q, offset, num_valid);
  }
}

}  // namespace flashinfer_core::cuda
