// Writing keys and values into the slots of a paged KV cache, whatever the strides of either.
//
// One thread takes whole tokens. If the dtypes agree, a token whose heads lie side by side on both sides is one copy,
// and otherwise each head is; if they differ, elements are converted through float32, rounding once, and divided by the
// scale of an FP8 cache before.
//
// Roofline: an element moves twice and costs nothing (a conversion: 2 operations). Memory bounds it.
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/vec.h"

namespace flashinfer_core::FIC_ISA {
namespace {

using Stream = AppendPagedKvParams::Stream;

template <class From, class To>
void convert(const From* in, To* out, int64_t n, float scale) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, sizeof(To) == 1 ? load(in + i) / scale : load(in + i));
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    const VecF x = load_n(in + i, rest);
    store_n(out + i, sizeof(To) == 1 ? x / scale : x, rest);
  }
}

template <class From, class To>
void convert_token(const Stream& s, int64_t num_heads, int64_t in, int64_t out) {
  const float scale = s.scale_tensor == nullptr ? s.scale : s.scale * *s.scale_tensor;
  for (int64_t h = 0; h < num_heads; ++h)
    convert(static_cast<const From*>(s.in) + in + h * s.in_stride_head,
            static_cast<To*>(s.cache) + out + h * s.cache_stride_head, s.dim, scale);
}

template <class From>
void convert_token_from(const Stream& s, int64_t num_heads, int64_t in, int64_t out) {
  switch (s.cache_dtype) {
    case DType::f32:
      return convert_token<From, float>(s, num_heads, in, out);
    case DType::f16:
      return convert_token<From, f16>(s, num_heads, in, out);
    case DType::bf16:
      return convert_token<From, bf16>(s, num_heads, in, out);
    case DType::e4m3:
      return convert_token<From, e4m3>(s, num_heads, in, out);
    case DType::e5m2:
      return convert_token<From, e5m2>(s, num_heads, in, out);
  }
}

// Element offsets of the token's first head: `in` in the input, `out` in the cache.
void write_token(const Stream& s, int64_t num_heads, int64_t in, int64_t out) {
  if (s.same_dtype) {
    const char* from = static_cast<const char*>(s.in) + in * s.element_size;
    char* to = static_cast<char*>(s.cache) + out * s.element_size;
    const int64_t head_bytes = s.dim * s.element_size;
    if (s.in_stride_head == s.dim && s.cache_stride_head == s.dim) {
      memcpy(to, from, static_cast<size_t>(num_heads * head_bytes));
      return;
    }
    for (int64_t h = 0; h < num_heads; ++h)
      memcpy(to + h * s.cache_stride_head * s.element_size, from + h * s.in_stride_head * s.element_size,
             static_cast<size_t>(head_bytes));
    return;
  }
  if (s.in_dtype == DType::f32)
    convert_token_from<float>(s, num_heads, in, out);
  else if (s.in_dtype == DType::f16)
    convert_token_from<f16>(s, num_heads, in, out);
  else
    convert_token_from<bf16>(s, num_heads, in, out);
}

}  // namespace

void append_paged_kv(const AppendPagedKvParams& p) {
  const int64_t token_bytes =
      2 * p.num_heads * (p.streams[0].dim * p.streams[0].element_size + p.streams[1].dim * p.streams[1].element_size);
  parallel_ranges(p.num_tokens, rows_per_range(token_bytes), [&p](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = p.slots[token];
      if (slot < 0) continue;
      const int64_t page = slot / p.page_size, slot_in_page = slot % p.page_size;
      for (const Stream& s : p.streams)
        write_token(s, p.num_heads, token * s.in_stride_token,
                    page * s.cache_stride_page + slot_in_page * s.cache_stride_slot);
    }
  });
}

}  // namespace flashinfer_core::FIC_ISA
