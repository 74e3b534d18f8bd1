// Arguments of the CUDA attention kernels: plain structs that host code fills and device code reads. Strides count
// elements, not bytes. Every pointer is a device address unless its comment says otherwise.
//
// `schedule_attention` (once for each plan) turns lengths into a list of requests, each cut into tiles of packed query
// rows and chunks of keys. `attention_sm80` (once for each layer) takes items from it: item = (request, KV head, tile,
// chunk). `merge_chunks` (after it, if tiles have many rows) merges what the chunks of a tile left. None needs a length
// on the host.
#pragma once

#include <cstdint>

namespace flashinfer_core::cuda {

// What went wrong in a plan or a run on the device, written to AttentionStatus in host memory, where the next call of
// the plan finds it. The kernels stay inside the tensors whatever the lengths and page numbers say.
enum class Fault : int32_t {
  none = 0,
  qo_indptr = 1,      // value: the decreasing or out-of-range entry
  kv_indptr = 2,      // likewise
  last_page_len = 3,  // outside of 1 to page_size
  kv_lens = 4,        // negative, or more than the pages of the table hold
  page = 5,           // page (ragged: token) outside of the cache
  query_rows = 6,     // qo_indptr[-1] above the rows of q
  workspace = 7,      // more pieces than the workspace was sized for
  rows = 8,           // outside of the rows of the table
};

struct alignas(16) AttentionStatus {  // in pinned host memory; the device writes it as one unit
  Fault fault;
  int32_t request;
  int64_t value;
};

// One request as the attention kernel sees it.
struct alignas(16) Request {
  int64_t kv_begin;  // first entry of the page table; without one, first token of K and V
  int32_t q_begin;   // first query token
  int32_t q_len;
  int32_t kv_len;
  int32_t num_chunks;  // items of a tile; a tile that sees fewer keys leaves the last of them empty
  int32_t first_item;
  int32_t first_slot;  // of its partial states, used if num_chunks > 1
};

// The head of a schedule. next_item and finished_ctas are zero before every run, and a run leaves them zero.
struct alignas(16) Schedule {
  int32_t num_items;
  int32_t chunk_len;  // keys of an item at most
  int32_t next_item;
  int32_t finished_ctas;
  int32_t num_slots;  // partial states in use
};

// Chunk lengths that are chosen from a batch are multiples of so many keys, and so of what a CTA takes at a time.
constexpr int32_t kChunkKeys = 128;

constexpr int32_t kScheduleThreads = 512;  // of the one CTA that makes a schedule
constexpr int32_t kMergeThreads = 256;     // of each CTA that merges

struct ScheduleParams {
  int32_t num_requests;
  const int32_t* qo_indptr;  // [num_requests + 1]; null: every request has q_len tokens
  int32_t q_len;
  // Keys of request r. Paged by CSR: entries kv_indptr[r] to kv_indptr[r + 1] of the table. Paged by a dense table:
  // entries from rows[r] * row_stride on (without rows: r * row_stride), at most table_size of them. No pages
  // (page_size 0): tokens from kv_indptr[r] on, or from r * row_stride on if kv_indptr is null.
  int32_t page_size;
  const int32_t* kv_indptr;
  int64_t table_size;  // CSR: entries of the table in all; dense: of one row; no pages: tokens of one request at most
  int64_t row_stride;
  const int32_t* kv_last_page_len;  // [num_requests], CSR; or null
  const int32_t* kv_lens;           // [num_requests]; null: from kv_last_page_len, or without pages from kv_indptr
  const int32_t* rows;              // [num_requests], rows of a dense table; or null
  int64_t num_rows;                 // that it has, if there are `rows`

  int32_t num_kv_heads, group;
  bool causal;
  int32_t window_left;  // -1: none

  int32_t tile_rows;    // packed rows (token * group + head in group) of a tile
  int32_t min_chunk;    // keys that are not worth cutting further
  int32_t num_ctas;     // of the attention kernel
  int32_t fixed_chunk;  // keys of a chunk; 0: chosen from the lengths; INT32_MAX: never cut
  int32_t num_slots;    // partial states that the workspace holds

  Request* requests;  // [num_requests]
  Schedule* schedule;
  AttentionStatus* status;  // host memory
};

struct AttentionParams {
  const Request* requests;
  Schedule* schedule;
  AttentionStatus* status;  // host memory
  int32_t num_requests;
  int32_t num_kv_heads, group;

  const void* q;  // [q_tokens, num_kv_heads * group, head_dim_qk]
  int64_t q_tokens, q_stride_token, q_stride_head;
  void* o;  // [q_tokens, num_kv_heads * group, head_dim_vo]
  int64_t o_stride_token, o_stride_head;
  float* lse;  // [q_tokens, num_kv_heads * group], base 2; null if not wanted
  int64_t lse_stride_token, lse_stride_head;

  // Key j of a request lies in page page_table[kv_begin + j / page_size], slot j % page_size. Without a page table it
  // is token kv_begin + j, which counts as a page of one slot.
  const void* k;
  int64_t k_stride_page, k_stride_slot, k_stride_head;
  const void* v;
  int64_t v_stride_page, v_stride_slot, v_stride_head;
  int64_t num_pages;
  const int32_t* page_table;  // null: none
  int64_t page_table_size;    // entries that may be read
  int32_t page_size;
  uint32_t page_magic, page_shift;    // see fast_divisor below
  uint32_t group_magic, group_shift;  // likewise, of group

  float sm_scale, logits_soft_cap, v_scale;              // logits_soft_cap is read by kernels compiled with soft cap
  const float *q_scale_ptr, *k_scale_ptr, *v_scale_ptr;  // one float each, or null: more factors of the same kind
  bool causal;
  int32_t window_left;         // -1: none
  const float* alibi_slopes;   // [num_qo_heads]; read by kernels compiled with ALiBi
  const float* sinks;          // [num_qo_heads] or null
  const uint8_t* custom_mask;  // bits, little endian; each request begins at byte mask_indptr[r]
  const int64_t* mask_indptr;
  int64_t mask_bytes;         // bits past them count as 0
  const float* rope_cos_sin;  // [rope_positions, head_dim_qk]: cosines, then sines, of the half-split rotation
  int64_t rope_positions;

  float* partial_o;    // [slots, tile_rows, head_dim_vo], normalized
  float* partial_lse;  // [slots, tile_rows], base 2
  int32_t* arrivals;   // [slots], zero before and after every run: pieces of a tile that are done, at its first slot
};

// Division by a fixed divisor d of numbers below 2^31: n / d == (magic ? umulhi(n, magic) >> shift : n).
inline void fast_divisor(uint32_t d, uint32_t* magic, uint32_t* shift) {
  if (d == 1) {
    *magic = *shift = 0;
    return;
  }
  uint32_t log2 = 0;
  while ((uint64_t{1} << log2) < d) ++log2;
  *magic = static_cast<uint32_t>(((uint64_t{1} << (31 + log2)) + d - 1) / d);
  *shift = log2 - 1;
}

// The shape of a compiled kernel: how one CTA's warps share a tile of query rows and a block of keys.
struct TileShape {
  int32_t warps_m, warps_kv;  // warps along rows, and teams along keys, each with a ring of its own
  int32_t rows_per_warp;      // 16 or 32
  int32_t block_keys;         // of one team
  int32_t stages;             // of a team's ring

  constexpr int32_t threads() const { return 32 * warps_m * warps_kv; }
  constexpr int32_t tile_rows() const { return warps_m * rows_per_warp; }
};

// Bytes of a row of `dim` elements in shared memory: padded with zeros to whole k16 steps, then to 128 bytes.
constexpr int32_t padded_row(int32_t dim, int32_t element_bytes) {
  return ((dim + 15) / 16 * 16 * element_bytes + 127) / 128 * 128;
}

constexpr int32_t kWorkBytes = 80;  // of the item in work, see struct Work in config.cuh

// Floats of an output row on its way through shared memory. The pad lets a quarter of a warp's rows miss each other's
// banks.
constexpr int32_t result_row(int32_t dim_vo) { return (dim_vo + 15) / 16 * 16 + 8; }

// Dynamic shared memory of a CTA: queries and the teams' rings of keys and values, whose place the teams' results take
// over; then, with FP8 keys, the factors of the queries; then the item in work. kv_bytes counts an element as it lies
// in shared memory: 1 for an FP8 cache that is copied as it is, else 2.
constexpr int32_t smem_bytes(TileShape tile, int32_t dim_qk, int32_t dim_vo, int32_t kv_bytes) {
  const int32_t stage = tile.block_keys * (padded_row(dim_qk, kv_bytes) + padded_row(dim_vo, kv_bytes));
  const int32_t inputs = tile.tile_rows() * padded_row(dim_qk, 2) + tile.warps_kv * tile.stages * stage;
  const int32_t results = tile.warps_kv > 1 ? tile.warps_kv * tile.tile_rows() * (result_row(dim_vo) + 2) * 4 : 0;
  return (inputs > results ? inputs : results) + (kv_bytes == 1 ? tile.tile_rows() * 4 : 0) + kWorkBytes;
}

}  // namespace flashinfer_core::cuda
