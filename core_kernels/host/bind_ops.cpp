// Bindings of the small operations. Shapes, dtypes and strides were checked in Python. The first argument of each is
// the CUDA kernel to launch; without one the tensors are on CPU, and the values of index tensors are checked here,
// where a pass over them costs nanoseconds, and always before anything is written.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "host/launch_ops.h"
#include "host/ops_arguments.h"

namespace py = pybind11;

namespace flashinfer_core {
namespace {

using Address = uintptr_t;
using RowsArg = Ints<3>;
using IndicesArg = Ints<4>;  // address, is it int64, stride, size

template <class T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(address);
}

Rows rows(const RowsArg& arg) { return {pointer<void>(arg.at[0]), arg.at[1], arg.at[2]}; }

IndexArray index_array(const IndicesArg& arg) {
  const auto& [address, wide, stride, size] = arg.at;
  return {pointer<const void>(address), wide != 0, stride, size};
}

// A 1-D tensor of int32 or int64 on CPU.
class Indices {
 public:
  Indices(const char* name, const IndicesArg& arg) : name(name), size(arg.at[3]), array_(index_array(arg)) {}

  int64_t operator[](int64_t i) const {
    return array_.wide ? static_cast<const int64_t*>(array_.data)[i * array_.stride]
                       : static_cast<const int32_t*>(array_.data)[i * array_.stride];
  }

  // The same numbers as contiguous int64, in `storage` if they are not that already.
  const int64_t* widened(std::vector<int64_t>* storage) const {
    if (array_.wide && array_.stride == 1) return static_cast<const int64_t*>(array_.data);
    storage->resize(static_cast<size_t>(size));
    for (int64_t i = 0; i < size; ++i) (*storage)[static_cast<size_t>(i)] = (*this)[i];
    return storage->data();
  }

  const char* const name;
  const int64_t size;

 private:
  const IndexArray array_;
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

void norm(const CudaCall& call, int dtype, int weight_dtype, bool layer_norm, int64_t outer, int64_t inner, int64_t dim,
          const RowsArg& in, const RowsArg& out, const RowsArg& residual, Address weight, Address bias,
          float weight_offset, float eps) {
  const NormParams p{static_cast<DType>(dtype),
                     static_cast<DType>(weight_dtype),
                     layer_norm,
                     outer,
                     inner,
                     dim,
                     rows(in),
                     rows(out),
                     rows(residual),
                     pointer<const void>(weight),
                     pointer<const void>(bias),
                     weight_offset,
                     eps};
  call.kernel != nullptr ? launch(call, p) : kernels().norm(p);
}

void activation(const CudaCall& call, int dtype, int kind, int64_t outer, int64_t inner, int64_t dim, const RowsArg& in,
                const RowsArg& out) {
  const ActivationParams p{
      static_cast<DType>(dtype), static_cast<Activation>(kind), outer, inner, dim, rows(in), rows(out)};
  call.kernel != nullptr ? launch(call, p) : kernels().activation(p);
}

// ---- rotary embedding -----------------------------------------------------------------------------------------------

// Dtype, interleave, tokens, head_dim, rotary_dim; then, of q and of k, the input with its strides of token and head,
// the same of the output, and the number of heads.
using RopeArg = Ints<19>;

RopeParams rope_params(const RopeArg& arg) {
  RopeParams p{};
  p.dtype = static_cast<DType>(arg.at[0]);
  p.interleave = arg.at[1] != 0;
  p.num_tokens = arg.at[2];
  p.head_dim = arg.at[3];
  p.rotary_dim = arg.at[4];
  for (int i = 0; i < 2; ++i) {
    const int64_t* x = arg.at + 5 + 7 * i;
    p.heads[i] = {pointer<const void>(x[0]), x[1], x[2], pointer<void>(x[3]), x[4], x[5], x[6]};
  }
  return p;
}

// The frequencies are on CPU, wherever the tensors are.
void rope_pos_ids(const CudaCall& call, const RopeArg& arg, const IndicesArg& pos_ids, Address frequencies) {
  RopeParams p = rope_params(arg);
  if (call.kernel != nullptr) {
    cuda::RopeLaunch on_gpu{p};
    on_gpu.positions = index_array(pos_ids);
    return launch(call, on_gpu, pointer<const float>(frequencies));
  }
  std::vector<int64_t> storage;
  p.positions = Indices("pos_ids", pos_ids).widened(&storage);
  p.frequencies = pointer<const float>(frequencies);
  kernels().rope(p);
}

void rope_indptr(const CudaCall& call, const RopeArg& arg, const IndicesArg& indptr_arg, const IndicesArg& offsets_arg,
                 Address frequencies) {
  RopeParams p = rope_params(arg);
  if (call.kernel != nullptr) {
    cuda::RopeLaunch on_gpu{p};
    on_gpu.indptr = index_array(indptr_arg);
    on_gpu.offsets = index_array(offsets_arg);
    return launch(call, on_gpu, pointer<const float>(frequencies));
  }
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

void rope_cached(const CudaCall& call, const RopeArg& arg, const IndicesArg& positions_arg, Address cos_sin_cache,
                 int64_t cached_positions, int64_t cos_sin_stride) {
  RopeParams p = rope_params(arg);
  p.cos_sin_cache = pointer<const float>(cos_sin_cache);
  p.cos_sin_stride = cos_sin_stride;
  if (call.kernel != nullptr) {
    cuda::RopeLaunch on_gpu{p};
    on_gpu.positions = index_array(positions_arg);
    on_gpu.cached_positions = cached_positions;
    return launch(call, on_gpu);
  }
  const Indices positions("positions", positions_arg);
  for (int64_t i = 0; i < positions.size; ++i) check_range(positions, i, 0, cached_positions - 1);
  std::vector<int64_t> storage;
  p.positions = positions.widened(&storage);
  kernels().rope(p);
}

// ---- pages ----------------------------------------------------------------------------------------------------------

// Dtypes of input and cache, whether they are the same, element size, dim, then the input and its strides of token and
// head, the cache and its strides of page, slot and head, and the scale, if it is a tensor.
using StreamArg = Ints<13>;

AppendPagedKvParams::Stream stream(const StreamArg& arg, float scale) {
  const auto& [in_dtype, cache_dtype, same_dtype, element_size, dim, in, in_token, in_head, cache, cache_page,
               cache_slot, cache_head, scale_tensor] = arg.at;
  return {static_cast<DType>(in_dtype),
          static_cast<DType>(cache_dtype),
          same_dtype != 0,
          static_cast<int32_t>(element_size),
          dim,
          pointer<const void>(in),
          in_token,
          in_head,
          pointer<void>(cache),
          cache_page,
          cache_slot,
          cache_head,
          scale,
          pointer<const float>(scale_tensor)};
}

// Keys and values may need different kernels.
void write_kv_slots(const CudaCall& k_call, const CudaCall& v_call, int64_t num_heads, int64_t num_pages,
                    int64_t page_size, const StreamArg& keys, float k_scale, const StreamArg& values, float v_scale,
                    const IndicesArg& slot_mapping) {
  AppendPagedKvParams p{
      slot_mapping.at[3], num_heads, page_size, {stream(keys, k_scale), stream(values, v_scale)}, nullptr};
  if (k_call.kernel != nullptr) {
    cuda::AppendLaunch on_gpu{p};
    on_gpu.num_pages = num_pages;
    on_gpu.slots = index_array(slot_mapping);
    return launch(k_call, v_call, on_gpu);
  }
  const Indices slots("slot_mapping", slot_mapping);
  const int64_t num_slots = num_pages * page_size;
  for (int64_t i = 0; i < slots.size; ++i) {
    if (slots[i] >= num_slots) refuse(slots, i, "slots below pages * page_size = " + std::to_string(num_slots));
  }
  std::vector<int64_t> storage;
  p.slots = slots.widened(&storage);
  kernels().append_paged_kv(p);
}

void append_paged_kv(const CudaCall& k_call, const CudaCall& v_call, int64_t num_heads, int64_t num_pages,
                     int64_t page_size, const StreamArg& keys, const StreamArg& values,
                     const IndicesArg& batch_indices_arg, const IndicesArg& positions_arg,
                     const IndicesArg& kv_indices_arg, const IndicesArg& kv_indptr_arg,
                     const IndicesArg& kv_last_page_len_arg) {
  AppendPagedKvParams p{
      batch_indices_arg.at[3], num_heads, page_size, {stream(keys, 1.0f), stream(values, 1.0f)}, nullptr};
  if (k_call.kernel != nullptr) {
    cuda::AppendLaunch on_gpu{p};
    on_gpu.num_pages = num_pages;
    on_gpu.batch_indices = index_array(batch_indices_arg);
    on_gpu.positions = index_array(positions_arg);
    on_gpu.kv_indices = index_array(kv_indices_arg);
    on_gpu.kv_indptr = index_array(kv_indptr_arg);
    on_gpu.kv_last_page_len = index_array(kv_last_page_len_arg);
    return launch(k_call, v_call, on_gpu);
  }
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
  kernels().append_paged_kv(p);
}

void batch_indices_positions(const CudaCall& call, const IndicesArg& append_indptr_arg, const IndicesArg& seq_lens_arg,
                             int64_t nnz, Address batch_indices_out, int64_t batch_indices_stride,
                             Address positions_out, int64_t positions_stride) {
  int32_t* batch_indices = pointer<int32_t>(batch_indices_out);
  int32_t* positions = pointer<int32_t>(positions_out);
  if (call.kernel != nullptr) {
    return launch(call, cuda::BatchPositionsParams{index_array(append_indptr_arg), index_array(seq_lens_arg), nnz,
                                                   batch_indices, batch_indices_stride, positions, positions_stride});
  }
  const Indices append_indptr("append_indptr", append_indptr_arg), seq_lens("seq_lens", seq_lens_arg);
  check_range(append_indptr, 0, 0, 0);
  check_not_decreasing(append_indptr);
  const int64_t last = append_indptr.size - 1, total = append_indptr[last];
  if (total > nnz) refuse(append_indptr, last, "a last value of at most nnz = " + std::to_string(nnz));
  for (int64_t b = 0; b < last; ++b) {
    const int64_t appended = append_indptr[b + 1] - append_indptr[b];
    if (seq_lens[b] < appended) refuse(seq_lens, b, "at least the appended " + std::to_string(appended));
  }
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

void seq_lens(const CudaCall& call, const IndicesArg& kv_indptr_arg, const IndicesArg& kv_last_page_len_arg,
              int64_t page_size, Address out_address) {
  int32_t* out = pointer<int32_t>(out_address);
  if (call.kernel != nullptr) {
    return launch(call,
                  cuda::SeqLensParams{index_array(kv_indptr_arg), index_array(kv_last_page_len_arg), page_size, out});
  }
  const Indices kv_indptr("kv_indptr", kv_indptr_arg), kv_last_page_len("kv_last_page_len", kv_last_page_len_arg);
  check_not_decreasing(kv_indptr);
  for (int64_t b = 0; b < kv_last_page_len.size; ++b) {
    const int64_t pages = kv_indptr[b + 1] - kv_indptr[b];
    if (pages > 0) check_range(kv_last_page_len, b, 1, page_size);
    out[b] = pages == 0 ? 0 : static_cast<int32_t>((pages - 1) * page_size + kv_last_page_len[b]);
  }
}

// ---- merging of states, packing of bits
// -------------------------------------------------------------------------------

using StateArg = Ints<6>;  // v, s with strides of token, head

StateView state_view(const StateArg& arg) {
  const auto& [v, v_token, v_head, s, s_token, s_head] = arg.at;
  return {pointer<const void>(v), v_token, v_head, pointer<const float>(s), s_token, s_head};
}

// State 0 is `first`, state i is `second` moved on by i - 1 strides.
void merge_states(const CudaCall& call, int dtype, int64_t num_tokens, int32_t num_heads, int32_t head_dim,
                  int32_t num_states, const StateArg& first, const StateArg& second, int64_t v_stride_state,
                  int64_t s_stride_state, const StateArg& out, Address mask) {
  const auto& [v, v_token, v_head, s, s_token, s_head] = out.at;
  const MergeStatesParams p{static_cast<DType>(dtype),
                            num_tokens,
                            num_heads,
                            head_dim,
                            num_states,
                            state_view(first),
                            state_view(second),
                            v_stride_state,
                            s_stride_state,
                            pointer<void>(v),
                            v_token,
                            v_head,
                            pointer<float>(s),
                            s_token,
                            s_head,
                            pointer<const uint8_t>(mask)};
  call.kernel != nullptr ? launch(call, p) : kernels().merge_states(p);
}

// On CUDA only.
void pack_bits(const CudaCall& call, Address x, int32_t element_size, int64_t stride, int64_t size, bool little,
               const IndicesArg& indptr, const IndicesArg& out_indptr, Address out, int64_t out_size) {
  launch(call, cuda::PackBitsParams{pointer<const void>(x), element_size, stride, size, little, index_array(indptr),
                                    index_array(out_indptr), pointer<uint8_t>(out), out_size});
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
  m.def("merge_states", &merge_states, Released());
  m.def("pack_bits", &pack_bits, Released());
  m.attr("MAX_ROPE_FREQUENCIES") = cuda::kMaxFrequencies;
}

}  // namespace flashinfer_core
