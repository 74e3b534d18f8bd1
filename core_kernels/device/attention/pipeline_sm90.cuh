// How the warpgroups of the SM90 kernel work together: shared memory, the barriers of its rings, and the warpgroup that
// loads.
//
// Its first warp finds items and has the copy engine (TMA) bring keys, its second values, the others bring queries by
// cp.async, which packs any group of heads into rows. The copy engine takes 40 cycles for a box, however small: boxes
// of 16 keys and 64 columns keep up with the products, of 8 cost 20 %, of 1 a factor of 7 (512 new tokens on 8,192
// keys, 8 requests: 590, 485 and 89 TFLOP/s). Small pages gathered row by row with cp.async, by one warp for keys and
// one for values: 206.
//
// All rows in shared memory are 128 bytes, 64 columns, in the swizzled order that wgmma reads; wider rows are several
// such panels.
#pragma once

#include "device/attention/items.cuh"
#include "device/attention/load.cuh"
#include "device/attention/params_sm90.h"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/tma.cuh"

namespace flashinfer_core::cuda {

static_assert(kDimQk % 64 == 0 && kDimVo % 64 == 0, "whole panels");
static_assert(kTileRows == kSm90TileRows && kThreads == kSm90Threads - 128);

constexpr int kPanelRow = 128;                      // bytes
constexpr int kQueryPanel = kTileRows * kPanelRow;  // likewise
constexpr int kBlockPanel = kBlockKeys * kPanelRow;
constexpr int kQueryPanels = kDimQk / 64, kValuePanels = kDimVo / 64;
constexpr int kKBytes = kQueryPanels * kBlockPanel, kVBytes = kValuePanels * kBlockPanel;  // of a stage
constexpr int kQueryWarps = 2;

// A ring of stages, or of items, as one side of it walks over it.
template <int Stages>
struct Ring {
  int stage = 0;
  uint32_t round = 0;  // modulo 2

  __device__ void next() {
    if (++stage == Stages) stage = 0, round ^= 1;
  }
};

// Places in the shared memory of the CTA. Of each ring one barrier says that a stage is full, another that it is free.
struct Shared {
  static constexpr int kBarriers = kQBytes + kStages * (kKBytes + kVBytes) + 2 * kWorkBytes;
  static constexpr int kBytes = sm90_smem_bytes(kBlockKeys, kStages, kDimQk, kDimVo);
  static_assert(kBytes == kBarriers + (4 * kStages + 6) * 8);

  char* base;
  uint32_t queries;  // its address

  __device__ explicit Shared(char* base) : base(base), queries(shared_address(base)) {}

  __device__ uint32_t keys(int stage) const { return queries + kQBytes + stage * kKBytes; }
  __device__ uint32_t values(int stage) const { return queries + kQBytes + kStages * kKBytes + stage * kVBytes; }
  __device__ Work& work(int slot) const {
    return *reinterpret_cast<Work*>(base + kBarriers - 2 * kWorkBytes + slot * kWorkBytes);
  }

  __device__ uint32_t queries_full() const { return barrier(0); }
  __device__ uint32_t queries_free() const { return barrier(1); }
  __device__ uint32_t work_full(int slot) const { return barrier(2 + slot); }
  __device__ uint32_t work_free(int slot) const { return barrier(4 + slot); }
  __device__ uint32_t keys_full(int stage) const { return barrier(6 + stage); }
  __device__ uint32_t keys_free(int stage) const { return barrier(6 + kStages + stage); }
  __device__ uint32_t values_full(int stage) const { return barrier(6 + 2 * kStages + stage); }
  __device__ uint32_t values_free(int stage) const { return barrier(6 + 3 * kStages + stage); }

  // By one thread, before any other comes near a barrier.
  __device__ void init_barriers() const {
    constexpr int kWarps = kThreads / 32;
    init_barrier(queries_full(), kQueryWarps);
    init_barrier(queries_free(), kWarps);
    for (int slot = 0; slot < 2; ++slot) {
      init_barrier(work_full(slot), 1);
      init_barrier(work_free(slot), kWarps + kQueryWarps + 1);
    }
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(keys_full(stage), 1);
      init_barrier(keys_free(stage), kWarps);
      init_barrier(values_full(stage), 1);
      init_barrier(values_free(stage), kWarps);
    }
    publish_barriers();
  }

 private:
  __device__ uint32_t barrier(int i) const { return queries + kBarriers + 8 * i; }
};

// One arrival for the whole warp, after all of its lanes have come here.
__device__ inline void arrive_warp(uint32_t barrier) {
  __syncwarp();
  if (lane_id() == 0) arrive(barrier);
}

// The factor that brings products q k to logits, without its sign, and whether it is negative: the sign then goes to
// the queries, or it would turn the maximum of the scores into their minimum.
__device__ inline float logit_scale(const AttentionParams& p, bool* negative) {
  float scale = p.sm_scale;
  if (p.q_scale_ptr != nullptr) scale *= *p.q_scale_ptr;
  if (p.k_scale_ptr != nullptr) scale *= *p.k_scale_ptr;
  *negative = scale < 0.0f;
  return fabsf(scale);
}

// The blocks of keys of an item. They begin where boxes begin, so that none crosses the end of a page; keys before the
// item's first are hidden by the masks.
struct Blocks {
  int first_key, count;

  __device__ Blocks(const AttentionSm90Params& p, const Item& item) {
    first_key = p.page_table == nullptr ? item.key_begin : item.key_begin / p.box_keys * p.box_keys;
    count = item.key_end > item.key_begin ? (item.key_end - first_key + kBlockKeys - 1) / kBlockKeys : 0;
  }
  __device__ int key(int block) const { return first_key + block * kBlockKeys; }
};

// The slot and page of the map that a box begins at; page -1, which is filled with zeros, if it holds no key.
__device__ inline Place locate_box(const AttentionSm90Params& p, const Item& item, int key) {
  if (key >= item.key_end) return {-1, 0};
  const int last = min_of(key + p.box_keys, item.key_end) - 1;  // where a ragged cache may end too early
  const Place place = locate(p, item, last);
  if (place.page < 0) return place;
  return p.page_table == nullptr ? Place{0, place.page - (last - key)} : Place{place.page, place.slot - (last - key)};
}

// Starts the copies of a block of keys or values, box by box. Each lane looks up the place of one of 32 boxes. Then one
// lane starts all: if every lane started its own, the warp would have to find one after the other, 65 cycles each.
template <int Panels>
__device__ inline void copy_block(const AttentionSm90Params& p, const Item& item, const TensorMap& map, uint32_t shared,
                                  uint32_t full, int block_key) {
  if (lane_id() == 0) arrive_expecting(full, Panels * kBlockPanel);
  __syncwarp();
  const int head = item.kv_head;
  const int step = 32 * p.box_keys, box_bytes = p.box_keys * kPanelRow;
  for (int key = 0; key < kBlockKeys; key += step) {
    const Place mine = locate_box(p, item, block_key + key + lane_id() * p.box_keys);
    const int end = min_of(key + step, kBlockKeys);
    uint32_t to = shared + key * kPanelRow;
#pragma unroll 4
    for (int box = key, lane = 0; box < end; box += p.box_keys, ++lane, to += box_bytes) {
      const int slot = __shfl_sync(0xffffffffu, mine.slot, lane), page = __shfl_sync(0xffffffffu, mine.page, lane);
      if (elect_lane()) {
#pragma unroll
        for (int panel = 0; panel < Panels; ++panel) {
          copy_box(to + panel * kBlockPanel, map, full, 0, slot, panel, head, page);
        }
      }
    }
  }
}

// Brings the part of the page table that the block before a key needs closer.
__device__ inline void prefetch_pages(const AttentionSm90Params& p, const Item& item, int block_key) {
  const int key = block_key - kBlockKeys + lane_id() * p.box_keys;
  if (p.page_table == nullptr || key < 0 || key >= block_key) return;
  const int64_t entry = item.request.kv_begin + divide(key, p.page_magic, p.page_shift);
  if (entry < p.page_table_size) prefetch(p.page_table + entry);
}

// The first warp: items, and the keys of each, its last block first, since that is the one with masks.
__device__ inline void load_keys(const AttentionSm90Params& p, const Shared& shared) {
  Ring<2> slots;
  Ring<kStages> k;
  int next = blockIdx.x;
  if (lane_id() < 2) {
    shared.work(lane_id()).num_items = p.schedule->num_items;
    shared.work(lane_id()).chunk_len = p.schedule->chunk_len;
  }
  __syncwarp();
  while (true) {
    Work& work = shared.work(slots.stage);
    wait(shared.work_free(slots.stage), slots.round ^ 1);
    find_item(p, next, work);
    arrive_warp(shared.work_full(slots.stage));
    if (work.done) break;
    slots.next();
    const Blocks blocks(p, work.item);
    for (int block = blocks.count - 1; block >= 0; --block) {
      const int key = blocks.key(block);
      wait(shared.keys_free(k.stage), k.round ^ 1);
      copy_block<kQueryPanels>(p, work.item, p.k_map, shared.keys(k.stage), shared.keys_full(k.stage), key);
      prefetch_pages(p, work.item, key);
      k.next();
    }
    if (lane_id() == 0) next = claim(p);
  }
  if (lane_id() == 0 && atomicAdd(&p.schedule->finished_ctas, 1) == static_cast<int>(gridDim.x) - 1) {
    p.schedule->next_item = 0;
    p.schedule->finished_ctas = 0;
  }
}

// The second warp: the values of each item.
__device__ inline void load_values(const AttentionSm90Params& p, const Shared& shared) {
  Ring<2> slots;
  Ring<kStages> v;
  while (true) {
    const Work& work = shared.work(slots.stage);
    wait(shared.work_full(slots.stage), slots.round);
    if (work.done) break;
    const Blocks blocks(p, work.item);
    for (int block = blocks.count - 1; block >= 0; --block) {
      wait(shared.values_free(v.stage), v.round ^ 1);
      copy_block<kValuePanels>(p, work.item, p.v_map, shared.values(v.stage), shared.values_full(v.stage),
                               blocks.key(block));
      v.next();
    }
    arrive_warp(shared.work_free(slots.stage));
    slots.next();
  }
}

// The other warps: the tile's queries; rows past the request are zero.
__device__ inline void load_queries(const AttentionSm90Params& p, const Shared& shared, int warp) {
  constexpr int kRows = 16;
  bool negative;
  logit_scale(p, &negative);
  Ring<2> slots;
  Ring<1> tiles;
  while (true) {
    const Work& work = shared.work(slots.stage);
    wait(shared.work_full(slots.stage), slots.round);
    if (work.done) break;
    const Item& item = work.item;
    const int end = num_query_rows(p, item);
    wait(shared.queries_free(), tiles.round ^ 1);
    for (int first = warp * kRows; first < kTileRows; first += kQueryWarps * kRows) {
      const int64_t offset = query_offset(p, item, min_of(item.row_begin + first + lane_id(), end - 1));
      for_each_chunk<kDimQk, 2, kRows>(
          static_cast<const char*>(p.q), offset, end - item.row_begin - first,
          [&](int row, int lane_chunk, int chunk, const char* source, bool valid) {
            cp_async_16(shared.queries + chunk / 8 * kQueryPanel + swizzled(first + row, kPanelRow, lane_chunk), source,
                        valid);
          });
    }
    cp_async_commit();
    cp_async_wait<0>();
    if (negative) {
      __syncwarp();
      for (int first = warp * kRows; first < kTileRows; first += kQueryWarps * kRows) {
        for (int panel = 0; panel < kQueryPanels; ++panel) {
          uint32_t* words = reinterpret_cast<uint32_t*>(shared.base + panel * kQueryPanel + first * kPanelRow);
          for (int i = lane_id(); i < kRows * kPanelRow / 4; i += 32) words[i] ^= 0x80008000u;
        }
      }
    }
    publish_to_async_proxy();
    arrive_warp(shared.queries_full());
    arrive_warp(shared.work_free(slots.stage));
    slots.next();
    tiles.next();
  }
}

}  // namespace flashinfer_core::cuda
