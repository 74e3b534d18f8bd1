// Bindings of the small operations. Shapes, dtypes and strides were checked in Python; the values of index tensors are
// checked here, where a pass over them costs nanoseconds, and always before anything is written.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/kernels.h"

namespace py = pybind11;

namespace flashinfer_core {
namespace {

using Address = uintptr_t;
using RowsArg = std::tuple<Address, int64_t, int64_t>;
using IndicesArg = std::tuple<Address, bool, int64_t, int64_t>;  // address, is it int64, stride, size

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

Rows rows(const RowsArg& arg) { return {pointer<void>(std::get<0>(arg)), std::get<1>(arg), std::get<2>(arg)}; }

// A 1-D tensor of int32 or int64.
class Indices {
 public:
  Indices(const char* name, const IndicesArg& arg) : name(name) { std::tie(address_, wide_, stride_, size) = arg; }

  int64_t operator[](int64_t i) const {
    return wide_ ? pointer<const int64_t>(address_)[i * stride_] : pointer<const int32_t>(address_)[i * stride_];
  }

  // The same numbers as contiguous int64, in `storage` if they are not that already.
  const int64_t* widened(std::vector<int64_t>* storage) const {
    if (wide_ && stride_ == 1) return pointer<const int64_t>(address_);
    storage->resize(static_cast<size_t>(size));
    for (int64_t i = 0; i < size; ++i) (*storage)[static_cast<size_t>(i)] = (*this)[i];
    return storage->data();
  }

  const char* const name;
  int64_t size = 0;

 private:
  Address address_ = 0;
  bool wide_ = false;
  int64_t stride_ = 0;
};

[[noreturn]] void refuse(const Indices& indices, int64_t i, const std::string& expected) {
  throw std::invalid_argument(std::string(indices.name) + ": expected " + expected + ", got " +
                              std::to_string(indices[i]) + " at index " + std::to_string(i));
}

void check_range(const Indices& indices, int64_t i, int64_t low, int64_t high) {
  const int64_t value = indices[i];
  if (value < low || value > high) {
    refuse(indices, i, "values from " + std::to_string(low) + " to " + std::to_string(high));
  }
}

void check_not_decreasing(const Indices& indptr) {
  for (int64_t i = 1; i < indptr.size; ++i) {
    if (indptr[i] < indptr[i - 1]) refuse(indptr, i, "values that do not decrease");
  }
}

// ---- norms and activations ------------------------------------------------------------------------------------------

void norm(int dtype, int weight_dtype, bool layer_norm, int64_t outer, int64_t inner, int64_t dim, const RowsArg& in,
          const RowsArg& out, const RowsArg& residual, Address weight, Address bias, float weight_offset, float eps) {
  kernels().norm({static_cast<DType>(dtype), static_cast<DType>(weight_dtype), layer_norm, outer, inner, dim, rows(in),
                  rows(out), rows(residual), pointer<const void>(weight), pointer<const void>(bias), weight_offset,
                  eps});
}

void activation(int dtype, int kind, int64_t outer, int64_t inner, int64_t dim, const RowsArg& in, const RowsArg& out) {
  kernels().activation(
      {static_cast<DType>(dtype), static_cast<Activation>(kind), outer, inner, dim, rows(in), rows(out)});
}

// ---- rotary embedding -----------------------------------------------------------------------------------------------

// Input, its strides of token and head, the same of the output, number of heads.
using HeadsArg = std::tuple<Address, int64_t, int64_t, Address, int64_t, int64_t, int64_t>;
// Dtype, interleave, tokens, head_dim, rotary_dim, q, k.
using RopeArg = std::tuple<int, bool, int64_t, int64_t, int64_t, HeadsArg, HeadsArg>;

RopeParams rope_params(const RopeArg& arg) {
  RopeParams p{};
  p.dtype = static_cast<DType>(std::get<0>(arg));
  p.interleave = std::get<1>(arg);
  p.num_tokens = std::get<2>(arg);
  p.head_dim = std::get<3>(arg);
  p.rotary_dim = std::get<4>(arg);
  const HeadsArg* heads[2] = {&std::get<5>(arg), &std::get<6>(arg)};
  for (int i = 0; i < 2; ++i) {
    const auto& [in, in_token, in_head, out, out_token, out_head, num_heads] = *heads[i];
    p.heads[i] = {pointer<const void>(in), in_token, in_head, pointer<void>(out), out_token, out_head, num_heads};
  }
  return p;
}

void rope_pos_ids(const RopeArg& arg, const IndicesArg& pos_ids, Address frequencies) {
  RopeParams p = rope_params(arg);
  std::vector<int64_t> storage;
  p.positions = Indices("pos_ids", pos_ids).widened(&storage);
  p.frequencies = pointer<const float>(frequencies);
  kernels().rope(p);
}

void rope_indptr(const RopeArg& arg, const IndicesArg& indptr_arg, const IndicesArg& offsets_arg, Address frequencies) {
  RopeParams p = rope_params(arg);
  const Indices indptr("indptr", indptr_arg), offsets("offsets", offsets_arg);
  check_range(indptr, 0, 0, 0);
  check_not_decreasing(indptr);
  const int64_t last = indptr.size - 1;
  if (indptr[last] != p.num_tokens) refuse(indptr, last, "the number of tokens, " + std::to_string(p.num_tokens));
  std::vector<int64_t> positions(static_cast<size_t>(p.num_tokens));
  for (int64_t b = 0; b < last; ++b) {
    for (int64_t i = indptr[b]; i < indptr[b + 1]; ++i) {
      positions[static_cast<size_t>(i)] = offsets[b] + (i - indptr[b]);
    }
  }
  p.positions = positions.data();
  p.frequencies = pointer<const float>(frequencies);
  kernels().rope(p);
}

void rope_cached(const RopeArg& arg, const IndicesArg& positions_arg, Address cos_sin_cache, int64_t cached_positions,
                 int64_t cos_sin_stride) {
  RopeParams p = rope_params(arg);
  const Indices positions("positions", positions_arg);
  for (int64_t i = 0; i < positions.size; ++i) check_range(positions, i, 0, cached_positions - 1);
  std::vector<int64_t> storage;
  p.positions = positions.widened(&storage);
  p.cos_sin_cache = pointer<const float>(cos_sin_cache);
  p.cos_sin_stride = cos_sin_stride;
  kernels().rope(p);
}

// ---- pages ----------------------------------------------------------------------------------------------------------

// Dtypes of input and cache, whether they are the same, element size, dim, then the input and its strides of token and
// head, and the cache and its strides of page, slot and head.
using StreamArg =
    std::tuple<int, int, bool, int32_t, int64_t, Address, int64_t, int64_t, Address, int64_t, int64_t, int64_t>;

AppendPagedKvParams append_params(int64_t num_heads, int64_t page_size, const StreamArg& keys,
                                  const StreamArg& values) {
  AppendPagedKvParams p{};
  p.num_heads = num_heads;
  p.page_size = page_size;
  const StreamArg* streams[2] = {&keys, &values};
  for (int i = 0; i < 2; ++i) {
    const auto& [in_dtype, cache_dtype, same_dtype, element_size, dim, in, in_token, in_head, cache, cache_page,
                 cache_slot, cache_head] = *streams[i];
    p.streams[i] = {static_cast<DType>(in_dtype),
                    static_cast<DType>(cache_dtype),
                    same_dtype,
                    element_size,
                    dim,
                    pointer<const void>(in),
                    in_token,
                    in_head,
                    pointer<void>(cache),
                    cache_page,
                    cache_slot,
                    cache_head};
  }
  return p;
}

void write_kv_slots(int64_t num_heads, int64_t num_pages, int64_t page_size, const StreamArg& keys,
                    const StreamArg& values, const IndicesArg& slot_mapping) {
  AppendPagedKvParams p = append_params(num_heads, page_size, keys, values);
  const Indices slots("slot_mapping", slot_mapping);
  const int64_t num_slots = num_pages * page_size;
  for (int64_t i = 0; i < slots.size; ++i) {
    if (slots[i] >= num_slots) refuse(slots, i, "slots below pages * page_size = " + std::to_string(num_slots));
  }
  std::vector<int64_t> storage;
  p.slots = slots.widened(&storage);
  p.num_tokens = slots.size;
  kernels().append_paged_kv(p);
}

void append_paged_kv(int64_t num_heads, int64_t num_pages, int64_t page_size, const StreamArg& keys,
                     const StreamArg& values, const IndicesArg& batch_indices_arg, const IndicesArg& positions_arg,
                     const IndicesArg& kv_indices_arg, const IndicesArg& kv_indptr_arg,
                     const IndicesArg& kv_last_page_len_arg) {
  AppendPagedKvParams p = append_params(num_heads, page_size, keys, values);
  const Indices batch_indices("batch_indices", batch_indices_arg), positions("positions", positions_arg),
      kv_indices("kv_indices", kv_indices_arg), kv_indptr("kv_indptr", kv_indptr_arg),
      kv_last_page_len("kv_last_page_len", kv_last_page_len_arg);
  check_not_decreasing(kv_indptr);
  check_range(kv_indptr, 0, 0, kv_indices.size);
  check_range(kv_indptr, kv_indptr.size - 1, 0, kv_indices.size);

  std::vector<int64_t> slots(static_cast<size_t>(batch_indices.size), -1);
  for (int64_t i = 0; i < batch_indices.size; ++i) {
    check_range(batch_indices, i, -1, kv_last_page_len.size - 1);
    const int64_t b = batch_indices[i];
    if (b < 0) continue;  // padding, see get_batch_indices_positions
    const int64_t pages = kv_indptr[b + 1] - kv_indptr[b];
    if (pages == 0) refuse(batch_indices, i, "requests that own pages (see kv_indptr)");
    check_range(kv_last_page_len, b, 1, page_size);
    check_range(positions, i, 0, (pages - 1) * page_size + kv_last_page_len[b] - 1);
    const int64_t entry = kv_indptr[b] + positions[i] / page_size;
    check_range(kv_indices, entry, 0, num_pages - 1);
    slots[static_cast<size_t>(i)] = kv_indices[entry] * page_size + positions[i] % page_size;
  }
  p.slots = slots.data();
  p.num_tokens = batch_indices.size;
  kernels().append_paged_kv(p);
}

void batch_indices_positions(const IndicesArg& append_indptr_arg, const IndicesArg& seq_lens_arg, int64_t nnz,
                             Address batch_indices_out, int64_t batch_indices_stride, Address positions_out,
                             int64_t positions_stride) {
  const Indices append_indptr("append_indptr", append_indptr_arg), seq_lens("seq_lens", seq_lens_arg);
  check_range(append_indptr, 0, 0, 0);
  check_not_decreasing(append_indptr);
  const int64_t last = append_indptr.size - 1, total = append_indptr[last];
  if (total > nnz) refuse(append_indptr, last, "a last value of at most nnz = " + std::to_string(nnz));
  for (int64_t b = 0; b < last; ++b) {
    const int64_t appended = append_indptr[b + 1] - append_indptr[b];
    if (seq_lens[b] < appended) refuse(seq_lens, b, "at least the appended " + std::to_string(appended));
  }
  int32_t* batch_indices = pointer<int32_t>(batch_indices_out);
  int32_t* positions = pointer<int32_t>(positions_out);
  for (int64_t b = 0; b < last; ++b) {
    const int64_t before = seq_lens[b] - append_indptr[b + 1];
    for (int64_t i = append_indptr[b]; i < append_indptr[b + 1]; ++i) {
      batch_indices[i * batch_indices_stride] = static_cast<int32_t>(b);
      positions[i * positions_stride] = static_cast<int32_t>(before + i);
    }
  }
  for (int64_t i = total; i < nnz; ++i) {
    batch_indices[i * batch_indices_stride] = -1;
    positions[i * positions_stride] = 0;
  }
}

void seq_lens(const IndicesArg& kv_indptr_arg, const IndicesArg& kv_last_page_len_arg, int64_t page_size,
              Address out_address) {
  const Indices kv_indptr("kv_indptr", kv_indptr_arg), kv_last_page_len("kv_last_page_len", kv_last_page_len_arg);
  check_not_decreasing(kv_indptr);
  int32_t* out = pointer<int32_t>(out_address);
  for (int64_t b = 0; b < kv_last_page_len.size; ++b) {
    const int64_t pages = kv_indptr[b + 1] - kv_indptr[b];
    if (pages > 0) check_range(kv_last_page_len, b, 1, page_size);
    out[b] = pages == 0 ? 0 : static_cast<int32_t>((pages - 1) * page_size + kv_last_page_len[b]);
  }
}

}  // namespace

void bind_ops(py::module_& m) {
  using Released = py::call_guard<py::gil_scoped_release>;
  m.def("norm", &norm, Released());
  m.def("activation", &activation, Released());
  m.def("rope_pos_ids", &rope_pos_ids, Released());
  m.def("rope_indptr", &rope_indptr, Released());
  m.def("rope_cached", &rope_cached, Released());
  m.def("write_kv_slots", &write_kv_slots, Released());
  m.def("append_paged_kv", &append_paged_kv, Released());
  m.def("batch_indices_positions", &batch_indices_positions, Released());
  m.def("seq_lens", &seq_lens, Released());
}

}  // namespace flashinfer_core
