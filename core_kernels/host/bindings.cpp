// The extension module flashinfer_core._native. Tensors arrive as addresses, strides and sizes: it links neither torch
// nor CUDA, so one build serves every release of torch. Callers check shapes and dtypes; see
// flashinfer_core/_checks.py.
#include <pybind11/pybind11.h>

#include "cpu/kernels.h"
#include "host/threads.h"

namespace py = pybind11;

namespace flashinfer_core {
void bind_attention(py::module_& m);
void bind_cuda(py::module_& m);
void bind_cuda_attention(py::module_& m);
void bind_ops(py::module_& m);
}  // namespace flashinfer_core

PYBIND11_MODULE(_native, m) {
  using namespace flashinfer_core;
  m.def("cpu_isa", [] { return kernels().isa; }, "The instruction set that the CPU kernels of this process use.");
  m.def("max_threads", &max_threads, "Threads that a kernel called from this thread may use.");
  m.def("openmp_runtime", &openmp_runtime, "Path of the OpenMP runtime that the kernels share with torch.");
  bind_attention(m);
  bind_cuda(m);
  bind_cuda_attention(m);
  bind_ops(m);
}
