// Turns the lengths of a batch into items of even cost, on the GPU: lengths that live there are never copied to the
// host, and a captured CUDA graph replays with new ones. One CTA; a few microseconds for any batch that is served.
//
// The rule. A tile sees at most `span` keys. If there are two tiles for each CTA of the attention kernel, and the
// longest fits into a CTA's fair share of all keys, nothing is cut. Otherwise chunks are a fair share long, so that
// CTAs, which take items as they get free, end together whatever the mix of lengths. Halves and quarters of a share
// were tried for decode: the bubble at the start of an item and the merging cost more (4 to 25 %) than evenness won.
#include "device/attention/status.cuh"

namespace flashinfer_core::cuda {
namespace {

constexpr int kThreads = kScheduleThreads;
constexpr int kWarps = kThreads / 32;

__device__ int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Reads the lengths of request r. What is wrong is reported, and the request then has no query or no key.
__device__ Request read_request(const ScheduleParams& p, int32_t r) {
  Request request{};
  request.q_begin = p.qo_indptr == nullptr ? r * p.q_len : p.qo_indptr[r];
  const int32_t q_end = p.qo_indptr == nullptr ? request.q_begin + p.q_len : p.qo_indptr[r + 1];
  request.q_len = q_end - request.q_begin;
  if (request.q_begin < 0 || q_end < request.q_begin || (r == 0 && request.q_begin != 0)) {
    report(p.status, Fault::qo_indptr, r, q_end < request.q_begin ? q_end : request.q_begin);
    request.q_len = 0;
  }

  int64_t entries = p.table_size;  // pages, or tokens without pages
  request.kv_begin = r * p.row_stride;
  if (p.rows != nullptr) {
    const int32_t row = p.rows[r];
    if (row < 0 || row >= p.num_rows) {
      report(p.status, Fault::rows, r, row);
      return request;
    }
    request.kv_begin = row * p.row_stride;
  }
  if (p.kv_indptr != nullptr) {
    const int32_t begin = p.kv_indptr[r], end = p.kv_indptr[r + 1];
    request.kv_begin = begin;
    entries = end - begin;
    if (begin < 0 || end < begin || end > p.table_size) {
      report(p.status, Fault::kv_indptr, r, end < begin || begin >= 0 ? end : begin);
      return request;
    }
  }
  const int64_t capacity = p.page_size == 0 ? entries : entries * p.page_size;
  int64_t kv_len = entries;
  if (p.kv_lens != nullptr) {
    kv_len = p.kv_lens[r];
  } else if (p.page_size != 0) {
    const int32_t last = p.kv_last_page_len[r];
    if (entries > 0 && (last < 1 || last > p.page_size)) {
      report(p.status, Fault::last_page_len, r, last);
      return request;
    }
    kv_len = entries == 0 ? 0 : (entries - 1) * p.page_size + last;
  }
  if (kv_len < 0 || kv_len > capacity || kv_len > INT32_MAX) {
    report(p.status, Fault::kv_lens, r, kv_len);
    return request;
  }
  request.kv_len = static_cast<int32_t>(kv_len);
  return request;
}

__device__ int64_t num_tiles(const ScheduleParams& p, const Request& request) {
  return ceil_div(static_cast<int64_t>(request.q_len) * p.group, p.tile_rows);
}

// The most keys that a tile of the request sees.
__device__ int32_t span(const ScheduleParams& p, const Request& request) {
  if (p.window_left < 0) return request.kv_len;
  // Packed rows may begin and end within a token.
  const int32_t tile_tokens = min(request.q_len, (p.tile_rows - 1) / p.group + 2);
  const int64_t keys = p.causal ? static_cast<int64_t>(p.window_left) + tile_tokens
                                : static_cast<int64_t>(p.window_left) + request.q_len;
  return static_cast<int32_t>(min(static_cast<int64_t>(request.kv_len), keys));
}

struct Sum {
  static __device__ int64_t combine(int64_t a, int64_t b) { return a + b; }
};
struct Max {
  static __device__ int64_t combine(int64_t a, int64_t b) { return a < b ? b : a; }
};

// Reduces over the CTA; every thread gets the result.
template <class Op>
__device__ int64_t reduce(int64_t x, int64_t* scratch) {
  for (int offset = 16; offset > 0; offset /= 2) x = Op::combine(x, __shfl_xor_sync(0xffffffffu, x, offset));
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  x = scratch[threadIdx.x % kWarps];
  for (int offset = kWarps / 2; offset > 0; offset /= 2) x = Op::combine(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

// Returns the sum over the threads before this one, and in *total the sum over all.
__device__ int64_t exclusive_scan(int64_t x, int64_t* scratch, int64_t* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t inclusive = x;
  for (int offset = 1; offset < 32; offset *= 2) {
    const int64_t other = __shfl_up_sync(0xffffffffu, inclusive, offset);
    if (lane >= offset) inclusive += other;
  }
  __syncthreads();
  if (lane == 31) scratch[warp] = inclusive;
  __syncthreads();
  int64_t before = 0;
  *total = 0;
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) before += scratch[i];
    *total += scratch[i];
  }
  return before + inclusive - x;
}

// Keys of a chunk.
__device__ int64_t choose_chunk(const ScheduleParams& p, int64_t blocks, int64_t tiles, int64_t longest) {
  if (p.fixed_chunk > 0) return p.fixed_chunk;
  const int64_t share = ceil_div(blocks, p.num_ctas);  // in units of kChunkKeys
  if (tiles >= 2 * static_cast<int64_t>(p.num_ctas) && longest <= share) return INT32_MAX;
  const int64_t chunk = share * kChunkKeys;
  return chunk < p.min_chunk ? p.min_chunk : chunk;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1) FIC_KERNEL(const __grid_constant__ ScheduleParams p) {
  __shared__ int64_t scratch[kWarps];
  int64_t blocks = 0, tiles = 0, longest = 0;
  for (int32_t r = threadIdx.x; r < p.num_requests; r += kThreads) {
    const Request request = read_request(p, r);
    p.requests[r] = request;
    const int64_t request_tiles = num_tiles(p, request) * p.num_kv_heads;
    const int64_t request_blocks = ceil_div(span(p, request), kChunkKeys);
    tiles += request_tiles;
    blocks += request_tiles * request_blocks;
    if (request_tiles > 0 && request_blocks > longest) longest = request_blocks;
  }
  blocks = reduce<Sum>(blocks, scratch);
  tiles = reduce<Sum>(tiles, scratch);
  longest = reduce<Max>(longest, scratch);
  const int64_t chunk = choose_chunk(p, blocks, tiles, longest);

  int64_t items = 0, slots = 0;
  for (int32_t first = 0; first < p.num_requests; first += kThreads) {
    const int32_t r = first + static_cast<int32_t>(threadIdx.x);
    Request request{};
    int64_t request_tiles = 0, num_chunks = 0;
    if (r < p.num_requests) {
      request = p.requests[r];
      request_tiles = num_tiles(p, request) * p.num_kv_heads;
      num_chunks = ceil_div(span(p, request), chunk);
      if (num_chunks < 1) num_chunks = 1;
    }
    int64_t all_slots, all_items;
    const int64_t wanted = num_chunks > 1 ? request_tiles * num_chunks : 0;
    const int64_t first_slot = slots + exclusive_scan(wanted, scratch, &all_slots);
    if (first_slot + wanted > p.num_slots && wanted > 0) {  // one chunk needs no slot, and sees the same keys
      report(p.status, Fault::workspace, r, first_slot + wanted);
      num_chunks = 1;
    }
    const int64_t first_item = items + exclusive_scan(request_tiles * num_chunks, scratch, &all_items);
    if (r < p.num_requests) {
      request.num_chunks = static_cast<int32_t>(num_chunks);
      request.first_item = static_cast<int32_t>(first_item);
      request.first_slot = static_cast<int32_t>(first_slot);
      p.requests[r] = request;
    }
    slots += all_slots;
    items += all_items;
  }
  if (threadIdx.x == 0) {
    *p.schedule = {static_cast<int32_t>(items), static_cast<int32_t>(chunk > INT32_MAX ? INT32_MAX : chunk), 0, 0,
                   static_cast<int32_t>(slots < p.num_slots ? slots : p.num_slots)};
  }
}

}  // namespace flashinfer_core::cuda
