// A planned attention batch on the CPU: lengths, page table and work list, ready to run any number of times.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/params.h"
#include "host/batch.h"
#include "host/planner.h"

namespace flashinfer_core {

class AttentionPlan {
 public:
  // Copies every array, of the page table what is in use: a caller who changes one afterwards cannot make a run read
  // past the cache. Throws std::invalid_argument with the caller's name of the argument that is wrong.
  AttentionPlan(const BatchArrays& batch, int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim_qk,
                int32_t head_dim_vo, bool causal, int32_t window_left, int32_t fixed_split_size, bool split_kv,
                const ArgumentNames& names);

  // Fills the planned half of the parameters; the caller has set tensors, scales and masks.
  void run(AttentionParams params) const;

  int64_t num_queries() const { return qo_indptr_.back(); }
  int64_t num_items() const { return static_cast<int64_t>(work_.items.size()); }
  int64_t num_splits() const { return static_cast<int64_t>(work_.merges.size()); }
  // One more than the largest page (ragged: token) that a run reads.
  int64_t kv_extent() const { return keys_.extent; }
  const std::vector<int32_t>& kv_lens() const { return keys_.lens; }

 private:
  int32_t page_size_, num_kv_heads_, group_, head_dim_qk_, head_dim_vo_;
  std::vector<int32_t> qo_indptr_, pages_;
  Keys keys_;  // which begin in pages_
  WorkList work_;
};

}  // namespace flashinfer_core
