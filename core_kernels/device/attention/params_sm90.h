// Arguments of the attention kernel for SM90, and the shared memory of its CTAs.
#pragma once

#include "device/attention/params.h"
#include "device/common/tensor_map.h"

namespace flashinfer_core::cuda {

// The maps of K and V have five dimensions: 64 columns, slots of a page (without pages: tokens), groups of 64 columns,
// heads, and pages (without pages: one). A box is `box_keys` slots of 64 columns: all of a block of keys without pages,
// else as many as divide a page and a block.
struct AttentionSm90Params : AttentionParams {
  TensorMap k_map, v_map;
  int32_t box_keys;
};

constexpr int32_t kSm90TileRows = 128;  // 64 for each of two warpgroups that multiply
constexpr int32_t kSm90Threads = 384;   // those, and one that loads

// Dynamic shared memory of a CTA: queries, the rings of keys and of values, two items, and the barriers.
constexpr int32_t sm90_smem_bytes(int32_t block_keys, int32_t stages, int32_t dim_qk, int32_t dim_vo) {
  const int32_t queries = kSm90TileRows * dim_qk * 2, stage = block_keys * (dim_qk + dim_vo) * 2;
  return queries + stages * stage + 2 * kWorkBytes + (4 * stages + 6) * 8;
}

}  // namespace flashinfer_core::cuda
