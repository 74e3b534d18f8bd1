// How Python hands over what the small operations work on: tensors as tuples of address, strides and sizes. pybind11's
// own way through std::tuple takes as long as a launch for the dozens of numbers that some calls have.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>

#include "host/launch_ops.h"

namespace flashinfer_core {

template <size_t N>
struct Ints {
  int64_t at[N];
};

}  // namespace flashinfer_core

namespace pybind11::detail {

template <size_t N>
struct type_caster<flashinfer_core::Ints<N>> {
  PYBIND11_TYPE_CASTER(flashinfer_core::Ints<N>, const_name("tuple[int, ...]"));

  bool load(handle source, bool) {
    if (!PyTuple_Check(source.ptr()) || PyTuple_GET_SIZE(source.ptr()) != static_cast<Py_ssize_t>(N)) return false;
    for (size_t i = 0; i < N; ++i) {
      value.at[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(source.ptr(), static_cast<Py_ssize_t>(i)));
    }
    if (PyErr_Occurred() == nullptr) return true;
    PyErr_Clear();
    return false;
  }
};

// (kernel, vectors, stream, pdl), or None for tensors on CPU.
template <>
struct type_caster<flashinfer_core::CudaCall> {
  PYBIND11_TYPE_CASTER(flashinfer_core::CudaCall, const_name("tuple[CudaKernel, bool, int, bool] | None"));

  bool load(handle source, bool) {
    value = {};
    if (source.is_none()) return true;
    if (!PyTuple_Check(source.ptr()) || PyTuple_GET_SIZE(source.ptr()) != 4) return false;
    make_caster<flashinfer_core::CudaKernel> kernel;
    if (!kernel.load(PyTuple_GET_ITEM(source.ptr(), 0), false)) return false;
    const auto number = [&](Py_ssize_t i) { return PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(source.ptr(), i)); };
    value = {cast_op<flashinfer_core::CudaKernel*>(kernel), number(1) != 0, number(2), number(3) != 0};
    if (PyErr_Occurred() == nullptr) return value.kernel != nullptr;
    PyErr_Clear();
    return false;
  }
};

}  // namespace pybind11::detail
