#include "host/attention_plan.h"

#include <algorithm>
#include <stdexcept>

#include "cpu/kernels.h"
#include "host/threads.h"

namespace flashinfer_core {
namespace {

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

std::string str(int64_t x) { return std::to_string(x); }

void check_indptr(const std::string& name, const int32_t* indptr, int64_t n) {
  if (indptr[0] != 0) fail(name + ": expected 0 at index 0, got " + str(indptr[0]));
  for (int64_t i = 0; i < n; ++i) {
    if (indptr[i + 1] < indptr[i]) {
      fail(name + ": expected values that do not decrease, got " + str(indptr[i]) + " at index " + str(i) +
           " and then " + str(indptr[i + 1]));
    }
  }
}

}  // namespace

AttentionPlan::AttentionPlan(int64_t num_requests, const int32_t* qo_indptr, const KvLayout& kv, int32_t num_qo_heads,
                             int32_t num_kv_heads, int32_t head_dim_qk, int32_t head_dim_vo, bool causal,
                             int32_t window_left, int32_t fixed_split_size, bool split_kv, const ArgumentNames& names)
    : ragged_(kv.table == nullptr),
      page_size_(kv.page_size),
      num_kv_heads_(num_kv_heads),
      group_(num_qo_heads / num_kv_heads),
      head_dim_qk_(head_dim_qk),
      head_dim_vo_(head_dim_vo) {
  check_and_copy(num_requests, qo_indptr, kv, names);
  work_ = plan_attention({num_requests, qo_indptr_.data(), kv_lens_.data(), num_kv_heads_, group_, head_dim_vo_, causal,
                          window_left, fixed_split_size, split_kv, max_threads()});
}

void AttentionPlan::check_and_copy(int64_t num_requests, const int32_t* qo_indptr, const KvLayout& kv,
                                   const ArgumentNames& names) {
  check_indptr(names.qo_indptr, qo_indptr, num_requests);
  if (int64_t{qo_indptr[num_requests]} * group_ > INT32_MAX) {
    fail(names.qo_indptr + ": expected query tokens times the GQA group below 2^31, got " +
         str(qo_indptr[num_requests]) + " tokens");
  }
  qo_indptr_.assign(qo_indptr, qo_indptr + num_requests + 1);
  if (kv.kv_indptr != nullptr) {
    check_indptr(names.kv_indptr, kv.kv_indptr, num_requests);
    if (kv.kv_indptr[num_requests] > kv.table_size) {
      fail(names.kv_indptr + ": expected at most " + str(kv.table_size) + ", the length of " + names.kv_indices +
           ", got " + str(kv.kv_indptr[num_requests]) + " at its end");
    }
  }
  kv_lens_.resize(num_requests);
  page_start_.resize(num_requests);
  for (int64_t r = 0; r < num_requests; ++r) {
    const int64_t pages = kv.kv_indptr == nullptr ? kv.table_size : kv.kv_indptr[r + 1] - kv.kv_indptr[r];
    const auto request = [r] { return " for request " + str(r); };
    int64_t kv_len;
    if (kv.kv_last_page_len != nullptr) {
      const int32_t last = kv.kv_last_page_len[r];
      if (pages > 0 && (last < 1 || last > kv.page_size)) {
        fail(names.kv_last_page_len + ": expected 1 to page_size = " + str(kv.page_size) + ", got " + str(last) +
             request());
      }
      kv_len = pages == 0 ? 0 : (pages - 1) * kv.page_size + last;
      if (kv_len > INT32_MAX) fail(names.kv_indptr + ": expected fewer than 2^31 keys, got " + str(kv_len) + request());
    } else {
      kv_len = kv.kv_lens[r];
      if (kv_len < 0) fail(names.kv_lens + ": expected lengths of at least 0, got " + str(kv_len) + request());
    }
    kv_lens_[r] = static_cast<int32_t>(kv_len);

    if (kv.table == nullptr) {
      page_start_[r] = kv.kv_start[r];
      if (kv_len > 0) kv_extent_ = std::max(kv_extent_, kv.kv_start[r] + kv_len);
      continue;
    }
    const int64_t used = (kv_len + kv.page_size - 1) / kv.page_size;
    if (used > pages) {
      fail(names.kv_lens + ": expected at most " + str(pages * kv.page_size) +
           ", what the pages of the table hold, got " + str(kv_len) + request());
    }
    const int32_t* table = kv.table + (kv.kv_indptr == nullptr ? r * kv.row_stride : kv.kv_indptr[r]);
    page_start_[r] = static_cast<int64_t>(pages_.size());
    for (int64_t i = 0; i < used; ++i) {
      if (table[i] < 0) {
        fail((kv.kv_indptr == nullptr ? names.block_table : names.kv_indices) +
             ": expected page numbers of at least 0, got " + str(table[i]) + request());
      }
      kv_extent_ = std::max<int64_t>(kv_extent_, int64_t{table[i]} + 1);
    }
    pages_.insert(pages_.end(), table, table + used);
  }
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
  params.page_table = ragged_ ? nullptr : pages_.data();
  params.page_start = page_start_.data();
  params.page_size = page_size_;
  params.qo_indptr = qo_indptr_.data();
  params.kv_lens = kv_lens_.data();
  params.items = work_.items.data();
  params.num_items = static_cast<int64_t>(work_.items.size());
  params.merges = work_.merges.data();
  params.merges_left = merges_left.data();
  params.workspace = workspace.data();
  kernels().attention(params);
}

}  // namespace flashinfer_core
