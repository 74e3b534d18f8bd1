#include "host/attention_plan.h"

#include "cpu/kernels.h"
#include "host/threads.h"

namespace flashinfer_core {

AttentionPlan::AttentionPlan(const BatchArrays& batch, int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim_qk,
                             int32_t head_dim_vo, bool causal, int32_t window_left, int32_t fixed_split_size,
                             bool split_kv, const ArgumentNames& names)
    : page_size_(batch.page_size),
      num_kv_heads_(num_kv_heads),
      group_(num_qo_heads / num_kv_heads),
      head_dim_qk_(head_dim_qk),
      head_dim_vo_(head_dim_vo),
      qo_indptr_(check_queries(batch, group_, names)),
      keys_(check_keys(batch, names)) {
  if (page_size_ > 0) {
    for (int64_t r = 0; r < batch.num_requests; ++r) {
      const int32_t* pages = batch.table + keys_.begin[r];
      keys_.begin[r] = static_cast<int64_t>(pages_.size());
      pages_.insert(pages_.end(), pages, pages + (int64_t{keys_.lens[r]} + page_size_ - 1) / page_size_);
    }
  }
  work_ = plan_attention({batch.num_requests, qo_indptr_.data(), keys_.lens.data(), num_kv_heads_, group_, head_dim_vo_,
                          causal, window_left, fixed_split_size, split_kv, max_threads()});
}

void AttentionPlan::run(AttentionParams params) const {
  // The partial states live with the calling thread, not with the plan: two threads may run one plan at a time.
  thread_local std::vector<float> workspace;
  thread_local std::vector<int32_t> merges_left;
  if (static_cast<int64_t>(workspace.size()) < work_.workspace_floats) workspace.resize(work_.workspace_floats);
  merges_left.resize(work_.merges.size());
  for (size_t i = 0; i < work_.merges.size(); ++i) merges_left[i] = work_.merges[i].num_partials;

  params.num_kv_heads = num_kv_heads_;
  params.group = group_;
  params.head_dim_qk = head_dim_qk_;
  params.head_dim_vo = head_dim_vo_;
  params.page_table = page_size_ == 0 ? nullptr : pages_.data();
  params.page_start = keys_.begin.data();
  params.page_size = page_size_;
  params.qo_indptr = qo_indptr_.data();
  params.kv_lens = keys_.lens.data();
  params.items = work_.items.data();
  params.num_items = static_cast<int64_t>(work_.items.size());
  params.merges = work_.merges.data();
  params.merges_left = merges_left.data();
  params.workspace = workspace.data();
  kernels().attention(params);
}

}  // namespace flashinfer_core
