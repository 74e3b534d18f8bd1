// Arguments of the CPU attention kernel: plain structs, filled by host/bind_attention.cpp. Strides count elements, not
// bytes.
#pragma once

#include <cstdint>

#include "device/common/params.h"

namespace flashinfer_core {

// Packed rows of a work item at most. A tile of keys is unpacked once an item and used by all its rows, so more rows
// make that cheaper; the scores and the output of 128 rows at head_dim 128 take 192 KiB of a core's second-level cache.
constexpr int32_t kRowTile = 128;

constexpr int32_t kMaxHeadDim = 256;

// One piece of attention work: rows [row_begin, row_end) of a request and KV head against keys [kv_begin, kv_end).
// Rows pack the GQA group: row = token_in_request * group + head_in_group, so a decode step of a group of 8 is 8 rows.
struct WorkItem {
  int32_t request, kv_head;
  int32_t row_begin, row_end;
  int32_t kv_begin, kv_end;
  int32_t merge;    // index into AttentionParams::merges, or -1 when this item covers all keys of its rows
  int32_t partial;  // which of the merge's partial states this item writes
};

// Rows whose keys were split over several work items. The item that finishes last merges, always in order of kv_begin.
struct MergeGroup {
  int32_t num_partials;
  int32_t num_rows;
  int64_t first_float;  // where the partial states begin in the workspace
};

struct AttentionParams {
  DType q_dtype, kv_dtype, o_dtype;
  int32_t num_kv_heads, group, head_dim_qk, head_dim_vo;

  const void* q;  // [tokens, num_kv_heads * group, head_dim_qk]
  int64_t q_stride_token, q_stride_head;
  void* o;  // [tokens, num_kv_heads * group, head_dim_vo]
  int64_t o_stride_token, o_stride_head;
  float* lse;  // [tokens, num_kv_heads * group], base 2; null if not wanted
  int64_t lse_stride_token, lse_stride_head;

  // Key j of request r lies in page page_table[page_start[r] + j / page_size], slot j % page_size. Without a page table
  // (ragged KV) it is token page_start[r] + j.
  const void* k;
  int64_t k_stride_page, k_stride_token, k_stride_head;
  const void* v;
  int64_t v_stride_page, v_stride_token, v_stride_head;
  const int32_t* page_table;
  const int64_t* page_start;
  int32_t page_size;

  const int32_t* qo_indptr;  // [requests + 1]
  const int32_t* kv_lens;    // [requests]
  const WorkItem* items;
  int64_t num_items;
  const MergeGroup* merges;
  int32_t* merges_left;  // a counter for each merge group, set to num_partials
  float* workspace;      // partial states, see MergeGroup

  float sm_scale, logits_soft_cap, v_scale;  // logits_soft_cap 0: none
  int32_t window_left;                       // -1: none
  bool causal;
  const float* alibi_slopes;   // [num_qo_heads] or null
  const float* sinks;          // [num_qo_heads] or null
  const uint8_t* custom_mask;  // bits, little endian; each request begins at byte mask_indptr[r]; or null
  const int64_t* mask_indptr;
  const float* rope_cos_sin;  // [positions, head_dim_qk]: cosines, then sines, of the half-split rotation; or null
};

}  // namespace flashinfer_core
