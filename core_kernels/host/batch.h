// Lengths and pages of an attention batch as they lie in host memory, checked before any kernel sees them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace flashinfer_core {

// What the caller calls its arguments, for error messages.
struct ArgumentNames {
  std::string qo_indptr, kv_indptr, kv_indices, kv_last_page_len, kv_lens, block_table, rows;
};

// The arrays of a batch; null for those that it lacks or that are not in host memory. Query rows of request r: from
// qo_indptr[r] to qo_indptr[r + 1], or q_len each if that is null. Keys are in one of four forms:
//   CSR pages    kv_indptr [requests + 1], table = kv_indices; lengths from kv_last_page_len or kv_lens
//   dense pages  table = block_table, row_stride, kv_lens; no kv_indptr; request r has row rows[r], or r
//   ragged       page_size 0, kv_indptr (of tokens), and kv_lens if they leave gaps
//   rows         page_size 0, kv_lens; request r begins at token r * row_stride
struct BatchArrays {
  int64_t num_requests = 0;
  const int32_t* qo_indptr = nullptr;
  int32_t q_len = 0;
  int32_t page_size = 0;
  const int32_t* table = nullptr;
  int64_t table_size = 0;  // CSR: entries of kv_indices; dense: of a row
  int64_t row_stride = 0;
  const int32_t* kv_indptr = nullptr;
  const int32_t* kv_last_page_len = nullptr;
  const int32_t* kv_lens = nullptr;
  const int32_t* rows = nullptr;
  int64_t num_rows = 0;  // of block_table, if there are `rows`
};

// Each function throws std::invalid_argument with the caller's name of the argument that is wrong.

// Returns the first query row of each request, and the end.
std::vector<int32_t> check_queries(const BatchArrays& batch, int32_t group, const ArgumentNames& names);

struct Keys {
  std::vector<int32_t> lens;
  std::vector<int64_t> begin;  // first entry of the page table; without pages the first token
  int64_t extent = 0;          // one more than the largest page (without pages: token) in use
};

// Page numbers are checked if the table is in host memory.
Keys check_keys(const BatchArrays& batch, const ArgumentNames& names);

}  // namespace flashinfer_core
