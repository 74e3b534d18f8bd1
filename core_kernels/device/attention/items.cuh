// The work list as the attention kernels read it: from the number of an item, or of a partial state, to its rows and
// keys.
#pragma once

#include "device/attention/config.cuh"

namespace flashinfer_core::cuda {

// The last request whose `First` (first_item or first_slot) is not after a number, by one warp: 32 probes at a time,
// the last of which bring the request along, since each step costs the latency of memory.
template <int32_t Request::* First>
__device__ inline int find_request(const AttentionParams& p, int number, Request* request) {
  constexpr uint32_t kAll = 0xffffffffu;
  int first = 0, count = p.num_requests;
  while (count > 32) {
    const int step = (count + 31) / 32, at = first + lane_id() * step;
    const bool reached = lane_id() * step < count && p.requests[at].*First <= number;
    const int last = 31 - __clz(__ballot_sync(kAll, reached));
    first += last * step;
    count = min_of(step, count - last * step);
  }
  const Request mine = p.requests[first + min_of(lane_id(), count - 1)];
  const int last = 31 - __clz(__ballot_sync(kAll, lane_id() < count && mine.*First <= number));
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

__device__ inline int num_tiles(const AttentionParams& p, const Request& request) {
  return (request.q_len * p.group + kTileRows - 1) / kTileRows;
}

// Completes an item of which the request, the KV head and the chunk are known.
__device__ inline void locate_tile(const AttentionParams& p, int tile, int chunk_len, Item& item) {
  const Request& request = item.request;
  item.slot = request.first_slot + (item.kv_head * num_tiles(p, request) + tile) * request.num_chunks;
  item.row_begin = tile * kTileRows;

  const int offset = request.kv_len - request.q_len;  // token i of the request stands at position i + offset
  const int last_row = min_of(item.row_begin + kTileRows, request.q_len * p.group) - 1;
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
}

// Where an item's rows and keys are. One whose chunk is not below num_chunks holds no key that others do not.
__device__ inline Item locate_item(const AttentionParams& p, int index, int chunk_len) {
  Item item;
  item.request_index = find_request<&Request::first_item>(p, index, &item.request);
  const Request& request = item.request;
  const int tiles = num_tiles(p, request);
  int rest = index - request.first_item;
  item.kv_head = rest / (tiles * request.num_chunks);
  rest -= item.kv_head * tiles * request.num_chunks;
  item.chunk = rest % request.num_chunks;
  // With causal masks the last tile sees the most keys: it goes first, so that the short ones fill the gaps at the end.
  locate_tile(p, tiles - 1 - rest / request.num_chunks, chunk_len, item);
  return item;
}

// The item that a partial state belongs to; without chunks (num_chunks 1) if it belongs to none.
__device__ inline Item locate_slot(const AttentionParams& p, int slot, int chunk_len) {
  Item item;
  item.request_index = find_request<&Request::first_slot>(p, slot, &item.request);
  const Request& request = item.request;
  item.num_chunks = 1;
  if (request.num_chunks == 1) return item;
  const int rest = slot - request.first_slot, tile = rest / request.num_chunks, tiles = num_tiles(p, request);
  item.chunk = rest % request.num_chunks;
  item.kv_head = tile / tiles;
  locate_tile(p, tile % tiles, chunk_len, item);
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

}  // namespace flashinfer_core::cuda
