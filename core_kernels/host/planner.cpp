#include "host/planner.h"

#include <algorithm>

namespace flashinfer_core {
namespace {

// Unpacking a key into the layout of the inner loops costs about as much as this many rows of arithmetic.
constexpr int64_t kUnpackRows = 8;
// An item shorter than this many keys is not worth a merge.
constexpr int32_t kMinSplit = 256;
// Items a thread gets if all go well; the more, the evener, and the more merging.
constexpr int64_t kItemsPerThread = 4;

int64_t cost(const WorkItem& item) {
  return (item.row_end - item.row_begin + kUnpackRows) * static_cast<int64_t>(item.kv_end - item.kv_begin);
}

// The keys that at least one row of the tile may see.
void visible_keys(const BatchShape& batch, int32_t qo_len, int32_t kv_len, WorkItem* item) {
  const int64_t offset = static_cast<int64_t>(kv_len) - qo_len;  // row i of the request stands at position i + offset
  int64_t begin = 0, end = kv_len;
  if (batch.causal) end = std::min<int64_t>(end, (item->row_end - 1) / batch.group + offset + 1);
  if (batch.window_left >= 0) {
    begin = std::max<int64_t>(begin, item->row_begin / batch.group + offset - batch.window_left);
  }
  item->kv_begin = static_cast<int32_t>(std::min<int64_t>(begin, kv_len));
  item->kv_end = static_cast<int32_t>(std::max<int64_t>(end, item->kv_begin));
}

}  // namespace

WorkList plan_attention(const BatchShape& batch) {
  std::vector<WorkItem> tiles;
  std::vector<int64_t> request_cost(batch.num_requests, 0);  // for one KV head
  int64_t total_cost = 0;
  for (int64_t r = 0; r < batch.num_requests; ++r) {
    const int32_t qo_len = batch.qo_indptr[r + 1] - batch.qo_indptr[r];
    const int64_t rows = static_cast<int64_t>(qo_len) * batch.group;
    for (int64_t row = 0; row < rows; row += kRowTile) {
      WorkItem item{};
      item.request = static_cast<int32_t>(r);
      item.row_begin = static_cast<int32_t>(row);
      item.row_end = static_cast<int32_t>(std::min<int64_t>(row + kRowTile, rows));
      item.merge = -1;
      visible_keys(batch, qo_len, batch.kv_lens[r], &item);
      for (int32_t head = 0; head < batch.num_kv_heads; ++head) {
        item.kv_head = head;
        tiles.push_back(item);
      }
      request_cost[r] += cost(item);
      total_cost += cost(item) * batch.num_kv_heads;
    }
  }

  WorkList list;
  const int64_t fair_cost = total_cost / (batch.num_threads * kItemsPerThread) + 1;
  for (WorkItem tile : tiles) {
    const int32_t keys = tile.kv_end - tile.kv_begin;
    int32_t split = keys;
    if (batch.fixed_split_size > 0) {
      split = batch.fixed_split_size;
    } else if (batch.split_kv && batch.num_threads > 1) {
      const int64_t pieces = std::min<int64_t>((cost(tile) + fair_cost - 1) / fair_cost, keys / kMinSplit);
      if (pieces > 1) split = static_cast<int32_t>((keys + pieces - 1) / pieces);
    }
    if (split >= keys) {
      list.items.push_back(tile);
      continue;
    }
    const int32_t rows = tile.row_end - tile.row_begin;
    const int32_t pieces = (keys + split - 1) / split;
    tile.merge = static_cast<int32_t>(list.merges.size());
    list.merges.push_back({pieces, rows, list.workspace_floats});
    list.workspace_floats += static_cast<int64_t>(pieces) * rows * (batch.head_dim_vo + 2);
    const int32_t end = tile.kv_end;
    for (int32_t piece = 0; piece < pieces; ++piece) {
      tile.partial = piece;
      tile.kv_end = std::min(tile.kv_begin + split, end);
      list.items.push_back(tile);
      tile.kv_begin = tile.kv_end;
    }
  }
  // Large requests first, so that small ones fill the gaps at the end. The tiles of one KV head follow each other: they
  // read the same keys, which then come from the cache that the cores share.
  std::stable_sort(list.items.begin(), list.items.end(), [&](const WorkItem& a, const WorkItem& b) {
    if (a.request != b.request) {
      const int64_t cost_a = request_cost[a.request], cost_b = request_cost[b.request];
      return cost_a != cost_b ? cost_a > cost_b : a.request < b.request;
    }
    return a.kv_head != b.kv_head ? a.kv_head < b.kv_head : cost(a) > cost(b);
  });
  return list;
}

}  // namespace flashinfer_core
