#pragma once

#include "device/common/params.h"

namespace flashinfer_core {

// Token t's key and value go to slot slots[t] % page_size of page slots[t] / page_size; a negative slot skips it.
struct AppendPagedKvParams {
  struct Stream {
    DType in_dtype, cache_dtype;
    bool same_dtype;       // then the bytes are copied, whatever they mean
    int32_t element_size;  // bytes of an element of the input
    int64_t dim;
    const void* in;  // [tokens, num_heads, dim]
    int64_t in_stride_token, in_stride_head;
    void* cache;  // [pages, page_size, num_heads, dim]
    int64_t cache_stride_page, cache_stride_slot, cache_stride_head;
    // FP8 caches hold x / (scale * *scale_tensor); the tensor may be null. Larger than the largest number saturates.
    float scale;
    const float* scale_tensor;
  };
  int64_t num_tokens, num_heads, page_size;
  Stream streams[2];     // keys, values
  const int64_t* slots;  // [tokens], CPU only
};

namespace cuda {

struct AppendLaunch {
  AppendPagedKvParams append;
  RowShape shape;        // a row is a token
  int32_t first_stream;  // that of the CTAs with blockIdx.y == 0
  int64_t num_pages;
  IndexArray slots;  // [tokens]; data null: slots follow from the next five
  IndexArray batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len;
};

struct BatchPositionsParams {
  IndexArray append_indptr, seq_lens;
  int64_t nnz;
  int32_t* batch_indices;  // [nnz]
  int64_t batch_indices_stride;
  int32_t* positions;  // [nnz]
  int64_t positions_stride;
};

struct SeqLensParams {
  IndexArray kv_indptr, kv_last_page_len;
  int64_t page_size;
  int32_t* out;  // [requests]
};

}  // namespace cuda
}  // namespace flashinfer_core
