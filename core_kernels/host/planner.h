// Cuts a batch of attention requests into work items of even cost. Used by the CPU path; knows nothing of tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/params.h"

namespace flashinfer_core {

struct BatchShape {
  int64_t num_requests;
  const int32_t* qo_indptr;  // [num_requests + 1]
  const int32_t* kv_lens;    // [num_requests]
  int32_t num_kv_heads, group, head_dim_vo;
  bool causal;
  int32_t window_left;       // -1: none
  int32_t fixed_split_size;  // keys of a split; 0: chosen here, from the batch and the number of threads
  bool split_kv;             // false: every row sees all its keys in one item
  int32_t num_threads;
};

struct WorkList {
  std::vector<WorkItem> items;  // in the order in which threads take them
  std::vector<MergeGroup> merges;
  int64_t workspace_floats = 0;
};

WorkList plan_attention(const BatchShape& batch);

}  // namespace flashinfer_core
