#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/kernels.h"
#include "host/attention_plan.h"

namespace py = pybind11;

namespace flashinfer_core {
namespace {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

using Address = uintptr_t;  // 0 for an argument that is absent

AttentionPlan* make_plan(int64_t num_requests, Address qo_indptr, int32_t page_size, Address table, int64_t table_size,
                         int64_t row_stride, Address kv_indptr, Address kv_last_page_len, Address kv_lens,
                         Address kv_start, int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim_qk,
                         int32_t head_dim_vo, bool causal, int32_t window_left, int32_t fixed_split_size, bool split_kv,
                         const std::array<std::string, 6>& names) {
  KvLayout kv;
  kv.page_size = page_size;
  kv.table = pointer<const int32_t>(table);
  kv.table_size = table_size;
  kv.row_stride = row_stride;
  kv.kv_indptr = pointer<const int32_t>(kv_indptr);
  kv.kv_last_page_len = pointer<const int32_t>(kv_last_page_len);
  kv.kv_lens = pointer<const int32_t>(kv_lens);
  kv.kv_start = pointer<const int64_t>(kv_start);
  return new AttentionPlan(num_requests, pointer<const int32_t>(qo_indptr), kv, num_qo_heads, num_kv_heads, head_dim_qk,
                           head_dim_vo, causal, window_left, fixed_split_size, split_kv,
                           {names[0], names[1], names[2], names[3], names[4], names[5]});
}

// What a run needs to know of its tensors besides their addresses. Layers of a model share it, so it is made once.
struct TensorLayout {
  int dtype_q, dtype_kv, dtype_o;
  std::array<int64_t, 2> q, o;  // strides of token, head
  std::array<int64_t, 3> k, v;  // strides of page, token, head
};

void run_plan(const AttentionPlan& plan, const TensorLayout& layout, Address q, Address k, Address v, Address o,
              Address lse, int64_t lse_token, int64_t lse_head, bool causal, int32_t window_left, float sm_scale,
              float logits_soft_cap, float v_scale, Address alibi_slopes, Address sinks, Address custom_mask,
              Address mask_indptr, Address rope_cos_sin) {
  AttentionParams p{};
  p.q_dtype = static_cast<DType>(layout.dtype_q);
  p.kv_dtype = static_cast<DType>(layout.dtype_kv);
  p.o_dtype = static_cast<DType>(layout.dtype_o);
  p.q = pointer<const void>(q);
  p.q_stride_token = layout.q[0];
  p.q_stride_head = layout.q[1];
  p.k = pointer<const void>(k);
  p.k_stride_page = layout.k[0];
  p.k_stride_token = layout.k[1];
  p.k_stride_head = layout.k[2];
  p.v = pointer<const void>(v);
  p.v_stride_page = layout.v[0];
  p.v_stride_token = layout.v[1];
  p.v_stride_head = layout.v[2];
  p.o = pointer<void>(o);
  p.o_stride_token = layout.o[0];
  p.o_stride_head = layout.o[1];
  p.lse = pointer<float>(lse);
  p.lse_stride_token = lse_token;
  p.lse_stride_head = lse_head;
  p.causal = causal;
  p.window_left = window_left;
  p.sm_scale = sm_scale;
  p.logits_soft_cap = logits_soft_cap;
  p.v_scale = v_scale;
  p.alibi_slopes = pointer<const float>(alibi_slopes);
  p.sinks = pointer<const float>(sinks);
  p.custom_mask = pointer<const uint8_t>(custom_mask);
  p.mask_indptr = pointer<const int64_t>(mask_indptr);
  p.rope_cos_sin = pointer<const float>(rope_cos_sin);
  py::gil_scoped_release release;
  plan.run(p);
}

using StateTuple = std::tuple<Address, int64_t, int64_t, Address, int64_t, int64_t>;

void merge_states(int dtype, int64_t num_tokens, int32_t num_heads, int32_t head_dim,
                  const std::vector<StateTuple>& states, Address v_out, int64_t v_out_token, int64_t v_out_head,
                  Address s_out, int64_t s_out_token, int64_t s_out_head, Address mask) {
  std::vector<StateView> views;
  for (const auto& [v, v_token, v_head, s, s_token, s_head] : states) {
    views.push_back({pointer<const void>(v), v_token, v_head, pointer<const float>(s), s_token, s_head});
  }
  py::gil_scoped_release release;
  kernels().merge_states({static_cast<DType>(dtype), num_tokens, num_heads, head_dim,
                          static_cast<int32_t>(views.size()), views.data(), pointer<void>(v_out), v_out_token,
                          v_out_head, pointer<float>(s_out), s_out_token, s_out_head, pointer<const uint8_t>(mask)});
}

}  // namespace

void bind_attention(py::module_& m) {
  py::class_<TensorLayout>(m, "TensorLayout")
      .def(py::init(
          [](int dtype_q, int dtype_kv, int dtype_o, const std::array<int64_t, 2>& q, const std::array<int64_t, 3>& k,
             const std::array<int64_t, 3>& v,
             const std::array<int64_t, 2>& o) { return TensorLayout{dtype_q, dtype_kv, dtype_o, q, o, k, v}; }));
  py::class_<AttentionPlan>(m, "AttentionPlan")
      .def(py::init(&make_plan), py::arg("num_requests"), py::arg("qo_indptr"), py::arg("page_size"), py::arg("table"),
           py::arg("table_size"), py::arg("row_stride"), py::arg("kv_indptr"), py::arg("kv_last_page_len"),
           py::arg("kv_lens"), py::arg("kv_start"), py::arg("num_qo_heads"), py::arg("num_kv_heads"),
           py::arg("head_dim_qk"), py::arg("head_dim_vo"), py::arg("causal"), py::arg("window_left"),
           py::arg("fixed_split_size"), py::arg("split_kv"), py::arg("names"))
      .def("run", &run_plan)
      .def_property_readonly("num_queries", &AttentionPlan::num_queries)
      .def_property_readonly("num_items", &AttentionPlan::num_items)
      .def_property_readonly("num_splits", &AttentionPlan::num_splits)
      .def_property_readonly("kv_extent", &AttentionPlan::kv_extent)
      .def_property_readonly("kv_lens", &AttentionPlan::kv_lens);
  m.def("merge_states", &merge_states);
  m.attr("MAX_HEAD_DIM") = kMaxHeadDim;
}

}  // namespace flashinfer_core
