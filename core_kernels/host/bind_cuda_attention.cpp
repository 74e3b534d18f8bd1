// Bindings of attention on a GPU, see host/cuda_attention.h.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "device/attention/params_sm90.h"
#include "host/attention_arguments.h"
#include "host/cuda_attention.h"

namespace py = pybind11;

namespace flashinfer_core {
namespace {

// What the host knows of a batch whose kernels run on a GPU: the rows and lengths whose arrays are in host memory.
struct HostBatch {
  std::optional<std::vector<int32_t>> qo_indptr;
  std::optional<Keys> keys;

  // Partial states of a run whose keys are cut after every `chunk`.
  int64_t num_slots(int64_t chunk, int32_t tile_rows, int32_t group, int32_t num_kv_heads) const {
    int64_t slots = 0;
    for (size_t r = 0; r < keys->lens.size(); ++r) {
      const int64_t rows = int64_t{(*qo_indptr)[r + 1] - (*qo_indptr)[r]} * group;
      const int64_t chunks = (keys->lens[r] + chunk - 1) / chunk;
      if (chunks > 1) slots += (rows + tile_rows - 1) / tile_rows * chunks * num_kv_heads;
    }
    return slots;
  }
};

HostBatch check_batch(const BatchTuple& batch, bool queries, bool keys, int32_t group, const NamesTuple& names) {
  const BatchArrays arrays = batch_arrays(batch);
  const ArgumentNames named = argument_names(names);
  HostBatch checked;
  if (queries) checked.qo_indptr = check_queries(arrays, group, named);
  if (keys) checked.keys = check_keys(arrays, named);
  return checked;
}

std::optional<int64_t> num_queries(const HostBatch& batch) {
  if (!batch.qo_indptr) return std::nullopt;
  return batch.qo_indptr->back();
}

std::optional<std::vector<int32_t>> kv_lens(const HostBatch& batch) {
  if (!batch.keys) return std::nullopt;
  return batch.keys->lens;
}

// Makes a plan and queues the kernel `scheduler`, which makes its work list.
std::unique_ptr<CudaAttentionPlan> make_plan(const CudaKernel& scheduler, uintptr_t stream, const BatchTuple& batch,
                                             int32_t num_kv_heads, int32_t group, bool causal, int32_t window_left,
                                             int32_t tile_rows, int32_t min_chunk, int32_t num_ctas,
                                             int32_t fixed_chunk, int32_t num_slots, Address requests, Address schedule,
                                             const AttentionStatus& status, int64_t page_table_size, Address partial_o,
                                             Address partial_lse, Address arrivals) {
  const BatchArrays arrays = batch_arrays(batch);
  cuda::ScheduleParams s{};
  s.num_requests = static_cast<int32_t>(arrays.num_requests);
  s.qo_indptr = arrays.qo_indptr;
  s.q_len = arrays.q_len;
  s.page_size = arrays.page_size;
  s.kv_indptr = arrays.kv_indptr;
  s.table_size = arrays.table_size;
  s.row_stride = arrays.row_stride;
  s.kv_last_page_len = arrays.kv_last_page_len;
  s.kv_lens = arrays.kv_lens;
  s.rows = arrays.rows;
  s.num_rows = arrays.num_rows;
  s.num_kv_heads = num_kv_heads;
  s.group = group;
  s.causal = causal;
  s.window_left = window_left;
  s.tile_rows = tile_rows;
  s.min_chunk = min_chunk;
  s.num_ctas = num_ctas;
  s.fixed_chunk = fixed_chunk;
  s.num_slots = num_slots;
  s.requests = pointer<cuda::Request>(requests);
  s.schedule = pointer<cuda::Schedule>(schedule);
  s.status = status.slot();

  cuda::AttentionParams p{};
  p.requests = s.requests;
  p.schedule = s.schedule;
  p.status = s.status;
  p.num_requests = s.num_requests;
  p.num_kv_heads = num_kv_heads;
  p.group = group;
  p.page_table = arrays.table;
  p.page_table_size = page_table_size;
  p.page_size = std::max(arrays.page_size, 1);
  cuda::fast_divisor(static_cast<uint32_t>(p.page_size), &p.page_magic, &p.page_shift);
  cuda::fast_divisor(static_cast<uint32_t>(group), &p.group_magic, &p.group_shift);
  p.partial_o = pointer<float>(partial_o);
  p.partial_lse = pointer<float>(partial_lse);
  p.arrivals = pointer<int32_t>(arrivals);
  auto plan = std::make_unique<CudaAttentionPlan>(s, p);
  plan->schedule(scheduler, stream);
  return plan;
}

// Further factors of the logits (the first two) and of the output: one float each, in the GPU's memory, or 0.
using ScaleTuple = std::tuple<Address, Address, Address>;

// Returns whether the run was queued: not while a fault waits to be raised.
bool run_plan(const CudaAttentionPlan& plan, const TensorLayout& layout, const RunTuple& run,
              const AttentionKernel& kernel, uintptr_t stream, const ScaleTuple& scales, int64_t mask_bytes,
              int64_t rope_positions) {
  if (plan.has_fault()) return false;
  cuda::AttentionParams p = plan.planned();
  set_run(p, layout, run);
  p.q_tokens = layout.q_tokens;
  p.k_stride_slot = layout.k[1];
  p.v_stride_slot = layout.v[1];
  p.num_pages = layout.num_pages;
  p.q_scale_ptr = pointer<const float>(std::get<0>(scales));
  p.k_scale_ptr = pointer<const float>(std::get<1>(scales));
  p.v_scale_ptr = pointer<const float>(std::get<2>(scales));
  p.mask_bytes = mask_bytes;
  p.rope_positions = rope_positions;
  py::gil_scoped_release release;
  plan.run(kernel, stream, p);
  return true;
}

// Address on the device; address in host memory, rows, and their bytes and distance.
using CopyTuple = std::tuple<Address, Address, size_t, size_t, size_t>;

void copy_all(const std::vector<CopyTuple>& tuples, uintptr_t stream, int device) {
  std::vector<HostCopy> copies;
  copies.reserve(tuples.size());
  for (const auto& [dst, src, num_rows, row_bytes, row_stride] : tuples) {
    copies.push_back({dst, pointer<const char>(src), num_rows, row_bytes, row_stride});
  }
  copy_to_device(copies, stream, device);
}

std::optional<std::tuple<int, int32_t, int64_t>> take_fault(AttentionStatus& status) {
  const auto found = status.take();
  if (!found) return std::nullopt;
  return std::make_tuple(static_cast<int>(found->fault), found->request, found->value);
}

int32_t attention_smem_bytes(int32_t warps_m, int32_t warps_kv, int32_t rows_per_warp, int32_t block_keys,
                             int32_t stages, int32_t dim_qk, int32_t dim_vo, int32_t kv_bytes) {
  return cuda::smem_bytes({warps_m, warps_kv, rows_per_warp, block_keys, stages}, dim_qk, dim_vo, kv_bytes);
}

}  // namespace

void bind_cuda_attention(py::module_& m) {
  py::class_<HostBatch>(m, "HostBatch")
      .def(py::init(&check_batch))
      .def("num_slots", &HostBatch::num_slots, py::arg("chunk"), py::arg("tile_rows"), py::arg("group"),
           py::arg("num_kv_heads"))
      .def_property_readonly("has_keys", [](const HostBatch& batch) { return batch.keys.has_value(); })
      .def_property_readonly("num_queries", &num_queries)
      .def_property_readonly("kv_extent",
                             [](const HostBatch& batch) { return batch.keys ? batch.keys->extent : int64_t{0}; })
      .def_property_readonly("kv_lens", &kv_lens);
  py::class_<AttentionStatus>(m, "AttentionStatus").def(py::init<>()).def("take", &take_fault);
  py::class_<AttentionKernel>(m, "AttentionKernel")
      .def(py::init([](std::shared_ptr<CudaKernel> kernel, uint32_t ctas, uint32_t threads, uint32_t smem,
                       std::shared_ptr<CudaKernel> merge, int32_t block_keys, int32_t dim_qk, int32_t dim_vo) {
             return AttentionKernel{std::move(kernel), ctas,       threads, smem,
                                    std::move(merge),  block_keys, dim_qk,  dim_vo};
           }),
           py::arg("kernel"), py::arg("ctas"), py::arg("threads"), py::arg("smem"), py::arg("merge") = nullptr,
           py::arg("block_keys") = 0, py::arg("dim_qk") = 0, py::arg("dim_vo") = 0);
  py::class_<CudaAttentionPlan>(m, "CudaAttentionPlan")
      .def(py::init(&make_plan))
      .def("schedule", &CudaAttentionPlan::schedule)
      .def("run", &run_plan);
  m.def("attention_smem_bytes", &attention_smem_bytes);
  m.def("attention_sm90_smem_bytes", &cuda::sm90_smem_bytes);
  m.def("copy_to_device", &copy_all);
  m.def("is_capturing", &is_capturing, py::arg("stream"), py::arg("device"));
}

}  // namespace flashinfer_core
