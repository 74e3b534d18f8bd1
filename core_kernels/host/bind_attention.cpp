#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <string>

#include "host/attention_arguments.h"
#include "host/attention_plan.h"

namespace py = pybind11;

namespace flashinfer_core {
namespace {

AttentionPlan* make_plan(const BatchTuple& batch, int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim_qk,
                         int32_t head_dim_vo, bool causal, int32_t window_left, int32_t fixed_split_size, bool split_kv,
                         const NamesTuple& names) {
  return new AttentionPlan(batch_arrays(batch), num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, causal,
                           window_left, fixed_split_size, split_kv, argument_names(names));
}

void run_plan(const AttentionPlan& plan, const TensorLayout& layout, const RunTuple& run) {
  AttentionParams p{};
  set_run(p, layout, run);
  p.q_dtype = static_cast<DType>(layout.dtype_q);
  p.kv_dtype = static_cast<DType>(layout.dtype_kv);
  p.o_dtype = static_cast<DType>(layout.dtype_o);
  p.k_stride_token = layout.k[1];
  p.v_stride_token = layout.v[1];
  py::gil_scoped_release release;
  plan.run(p);
}

}  // namespace

void bind_attention(py::module_& m) {
  py::class_<TensorLayout>(m, "TensorLayout")
      .def(py::init([](int dtype_q, int dtype_kv, int dtype_o, int64_t q_tokens, int64_t num_pages,
                       const std::array<int64_t, 2>& q, const std::array<int64_t, 3>& k,
                       const std::array<int64_t, 3>& v, const std::array<int64_t, 2>& o) {
        return TensorLayout{dtype_q, dtype_kv, dtype_o, q_tokens, num_pages, q, o, k, v};
      }));
  py::class_<AttentionPlan>(m, "AttentionPlan")
      .def(py::init(&make_plan), py::arg("batch"), py::arg("num_qo_heads"), py::arg("num_kv_heads"),
           py::arg("head_dim_qk"), py::arg("head_dim_vo"), py::arg("causal"), py::arg("window_left"),
           py::arg("fixed_split_size"), py::arg("split_kv"), py::arg("names"))
      .def("run", &run_plan)
      .def_property_readonly("num_queries", &AttentionPlan::num_queries)
      .def_property_readonly("num_splits", &AttentionPlan::num_splits)
      .def_property_readonly("kv_extent", &AttentionPlan::kv_extent)
      .def_property_readonly("kv_lens", &AttentionPlan::kv_lens);
  m.attr("MAX_HEAD_DIM") = kMaxHeadDim;
}

}  // namespace flashinfer_core
