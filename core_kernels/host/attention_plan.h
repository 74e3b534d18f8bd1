// A planned attention batch on the CPU: lengths, page table and work list, ready to run any number of times.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpu/params.h"
#include "host/planner.h"

namespace flashinfer_core {

// What the caller calls its arguments, for error messages.
struct ArgumentNames {
  std::string qo_indptr, kv_indptr, kv_indices, kv_last_page_len, kv_lens, block_table;
};

// Where the keys of each request are. Exactly one of three forms, told apart by which pointers are set:
//   CSR pages    kv_indptr [requests + 1], table = kv_indices; kv_lens from kv_last_page_len or given
//   dense pages  table = block_table, row_stride; kv_lens given
//   ragged       kv_start [requests], no table; kv_lens given
struct KvLayout {
  int32_t page_size = 0;  // 0: ragged
  const int32_t* table = nullptr;
  int64_t table_size = 0;  // CSR: entries of kv_indices; dense: pages of a row
  int64_t row_stride = 0;  // dense
  const int32_t* kv_indptr = nullptr;
  const int32_t* kv_last_page_len = nullptr;
  const int32_t* kv_lens = nullptr;
  const int64_t* kv_start = nullptr;
};

class AttentionPlan {
 public:
  // Copies every array, of the page table what is in use: a caller who changes one afterwards cannot make a run read
  // past the cache. Throws std::invalid_argument with the caller's name of the argument that is wrong.
  AttentionPlan(int64_t num_requests, const int32_t* qo_indptr, const KvLayout& kv, int32_t num_qo_heads,
                int32_t num_kv_heads, int32_t head_dim_qk, int32_t head_dim_vo, bool causal, int32_t window_left,
                int32_t fixed_split_size, bool split_kv, const ArgumentNames& names);

  // Fills the planned half of the parameters; the caller has set tensors, scales and masks.
  void run(AttentionParams params) const;

  int64_t num_queries() const { return qo_indptr_.back(); }
  int64_t num_items() const { return static_cast<int64_t>(work_.items.size()); }
  int64_t num_splits() const { return static_cast<int64_t>(work_.merges.size()); }
  // One more than the largest page (ragged: token) that a run reads.
  int64_t kv_extent() const { return kv_extent_; }
  const std::vector<int32_t>& kv_lens() const { return kv_lens_; }

 private:
  void check_and_copy(int64_t num_requests, const int32_t* qo_indptr, const KvLayout& kv, const ArgumentNames& names);

  std::vector<int32_t> qo_indptr_, kv_lens_, pages_;
  std::vector<int64_t> page_start_;
  bool ragged_;
  int32_t page_size_, num_kv_heads_, group_, head_dim_qk_, head_dim_vo_;
  int64_t kv_extent_ = 0;
  WorkList work_;
};

}  // namespace flashinfer_core
