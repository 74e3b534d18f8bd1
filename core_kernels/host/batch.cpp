#include "host/batch.h"

#include <algorithm>
#include <stdexcept>

namespace flashinfer_core {
namespace {

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

std::string str(int64_t x) { return std::to_string(x); }

std::string request(int64_t r) { return " for request " + str(r); }

void check_indptr(const std::string& name, const int32_t* indptr, int64_t n) {
  if (indptr[0] != 0) fail(name + ": expected 0 at index 0, got " + str(indptr[0]));
  for (int64_t i = 0; i < n; ++i) {
    if (indptr[i + 1] < indptr[i]) {
      fail(name + ": expected values that do not decrease, got " + str(indptr[i]) + " at index " + str(i) +
           " and then " + str(indptr[i + 1]));
    }
  }
}

int64_t check_length(const BatchArrays& batch, int64_t r, int64_t pages, const ArgumentNames& names) {
  if (batch.kv_lens != nullptr) {
    const int64_t len = batch.kv_lens[r];
    if (len < 0) fail(names.kv_lens + ": expected lengths of at least 0, got " + str(len) + request(r));
    return len;
  }
  if (batch.page_size == 0) return batch.kv_indptr[r + 1] - batch.kv_indptr[r];
  if (pages == 0) return 0;
  const int32_t last = batch.kv_last_page_len[r];
  if (last < 1 || last > batch.page_size) {
    fail(names.kv_last_page_len + ": expected 1 to page_size = " + str(batch.page_size) + ", got " + str(last) +
         request(r));
  }
  const int64_t len = (pages - 1) * batch.page_size + last;
  if (len > INT32_MAX) fail(names.kv_indptr + ": expected fewer than 2^31 keys, got " + str(len) + request(r));
  return len;
}

// Returns where the keys of request r begin in a dense table, or without pages in the tokens.
int64_t row_begin(const BatchArrays& batch, int64_t r, const ArgumentNames& names) {
  if (batch.rows == nullptr) return r * batch.row_stride;
  const int64_t row = batch.rows[r];
  if (row < 0 || row >= batch.num_rows) {
    fail(names.rows + ": expected rows of " + names.block_table + ", which has " + str(batch.num_rows) + ", got " +
         str(row) + request(r));
  }
  return row * batch.row_stride;
}

// Returns one more than the largest of some page numbers. Two plain sweeps, which the compiler turns into vectors.
int64_t check_pages(const int32_t* pages, int64_t count, int64_t r, const std::string& name) {
  int32_t largest = -1, signs = 0;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, pages[i]);
    signs |= pages[i];
  }
  if (signs < 0) {
    const int32_t bad = *std::find_if(pages, pages + count, [](int32_t page) { return page < 0; });
    fail(name + ": expected page numbers of at least 0, got " + str(bad) + request(r));
  }
  return int64_t{largest} + 1;
}

}  // namespace

std::vector<int32_t> check_queries(const BatchArrays& batch, int32_t group, const ArgumentNames& names) {
  const int64_t n = batch.num_requests;
  if (batch.qo_indptr != nullptr) check_indptr(names.qo_indptr, batch.qo_indptr, n);
  const int64_t rows = batch.qo_indptr == nullptr ? n * batch.q_len : batch.qo_indptr[n];
  if (rows * group > INT32_MAX) {
    fail(names.qo_indptr + ": expected query tokens times the GQA group below 2^31, got " + str(rows) + " tokens");
  }
  std::vector<int32_t> qo_indptr(n + 1);
  for (int64_t r = 0; r <= n; ++r) {
    qo_indptr[r] = batch.qo_indptr == nullptr ? static_cast<int32_t>(r * batch.q_len) : batch.qo_indptr[r];
  }
  return qo_indptr;
}

Keys check_keys(const BatchArrays& batch, const ArgumentNames& names) {
  const int64_t n = batch.num_requests;
  const bool csr = batch.kv_indptr != nullptr;
  if (csr) {
    check_indptr(names.kv_indptr, batch.kv_indptr, n);
    if (batch.page_size > 0 && batch.kv_indptr[n] > batch.table_size) {
      fail(names.kv_indptr + ": expected at most " + str(batch.table_size) + ", the length of " + names.kv_indices +
           ", got " + str(batch.kv_indptr[n]) + " at its end");
    }
  }
  Keys keys;
  keys.lens.resize(n);
  keys.begin.resize(n);
  for (int64_t r = 0; r < n; ++r) {
    const int64_t pages = csr ? batch.kv_indptr[r + 1] - batch.kv_indptr[r] : batch.table_size;
    const int64_t len = check_length(batch, r, pages, names);
    keys.lens[r] = static_cast<int32_t>(len);
    keys.begin[r] = csr ? batch.kv_indptr[r] : row_begin(batch, r, names);
    if (batch.page_size == 0) {
      if (len > 0) keys.extent = std::max(keys.extent, keys.begin[r] + len);
      continue;
    }
    const int64_t used = (len + batch.page_size - 1) / batch.page_size;
    if (used > pages) {
      fail(names.kv_lens + ": expected at most " + str(pages * batch.page_size) +
           ", what the pages of the table hold, got " + str(len) + request(r));
    }
    if (batch.table != nullptr) {
      const std::string& name = csr ? names.kv_indices : names.block_table;
      keys.extent = std::max(keys.extent, check_pages(batch.table + keys.begin[r], used, r, name));
    }
  }
  return keys;
}

}  // namespace flashinfer_core
