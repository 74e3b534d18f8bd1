// Bindings of the CUDA driver, see host/driver.h.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <string_view>
#include <tuple>

#include "host/driver.h"

namespace py = pybind11;

namespace flashinfer_core {
namespace {

std::shared_ptr<CudaKernel> load_kernel(const py::bytes& cubin, const std::string& name, int device) {
  const std::string_view image = cubin;
  const py::gil_scoped_release released;  // the first one on a device creates its context, which takes a while
  return std::make_shared<CudaKernel>(image.data(), name, device);
}

void launch(const CudaKernel& kernel, const std::tuple<uint32_t, uint32_t, uint32_t>& grid, uint32_t block,
            uint32_t smem, uintptr_t stream, const py::bytes& params, bool pdl) {
  const std::string_view bytes = params;
  kernel.check_params_bytes(bytes.size());
  const auto [x, y, z] = grid;
  kernel.launch(x, y, z, block, smem, stream, bytes.data(), pdl);
}

}  // namespace

void bind_cuda(py::module_& m) {
  py::class_<CudaKernel, std::shared_ptr<CudaKernel>>(m, "CudaKernel")
      .def(py::init(&load_kernel), py::arg("cubin"), py::arg("name"), py::arg("device"))
      .def("launch", &launch, py::arg("grid"), py::arg("block"), py::arg("smem"), py::arg("stream"), py::arg("params"),
           py::arg("pdl") = false)
      .def("occupancy", &CudaKernel::occupancy, py::arg("block"), py::arg("smem"))
      .def_property_readonly("device", &CudaKernel::device)
      .def_property_readonly("registers", &CudaKernel::registers)
      .def_property_readonly("local_bytes", &CudaKernel::local_bytes)
      .def_property_readonly("static_smem", &CudaKernel::static_smem);
  py::class_<CudaDevice>(m, "CudaDevice")
      .def_readonly("name", &CudaDevice::name)
      .def_readonly("compute_capability", &CudaDevice::compute_capability)
      .def_readonly("num_sms", &CudaDevice::num_sms)
      .def_readonly("max_smem_per_block", &CudaDevice::max_smem_per_block)
      .def_readonly("max_smem_per_sm", &CudaDevice::max_smem_per_sm)
      .def_readonly("l2_bytes", &CudaDevice::l2_bytes);
  m.def("cuda_device", &cuda_device, py::arg("index"), py::return_value_policy::reference);
  m.def("cuda_device_count", &cuda_device_count);
  m.def("cuda_driver_version", &cuda_driver_version);
}

}  // namespace flashinfer_core
