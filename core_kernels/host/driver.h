// The CUDA driver, found at run time: the extension neither links a CUDA library nor includes a CUDA header. Every
// failure is a std::runtime_error that names the driver's function and its error, as in
// "cuModuleLoadData: CUDA_ERROR_NO_BINARY_FOR_GPU (no kernel image is available for execution on the device)".
//
// Work happens in a device's primary context, which is also torch's. Each call makes it current if it is not, and
// restores what was current before.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "device/common/tensor_map.h"

namespace flashinfer_core {

// Version of CUDA that the driver supports, such as 13000; none if no driver is installed.
std::optional<int> cuda_driver_version();

// GPUs that the driver sees, 0 if there are none. Throws without a driver.
int cuda_device_count();

struct CudaDevice {
  int compute_capability;  // 90 for 9.0
  int num_sms;
  int max_smem_per_block;  // bytes that a kernel can ask for
  int max_smem_per_sm;
  size_t l2_bytes;
  std::string name;
};

const CudaDevice& cuda_device(int index);  // asked of the driver once

struct Grid {
  uint32_t x, y, z;
};

// One kernel of one cubin, loaded on one device until the process ends: CUDA graphs may refer to it. Launches may come
// from several threads.
class CudaKernel {
 public:
  CudaKernel(const void* cubin, const std::string& name, int device);
  CudaKernel(const CudaKernel&) = delete;
  CudaKernel& operator=(const CudaKernel&) = delete;

  // Queues the kernel, whose one argument is the struct at params; it is copied before the call returns. With pdl the
  // kernel may start before the one ahead of it in the stream ends (on SM90 and later; a hint), so it must execute
  // griddepcontrol.wait before it reads what that one writes.
  void launch(uint32_t grid_x, uint32_t grid_y, uint32_t grid_z, uint32_t block, uint32_t smem, uintptr_t stream,
              const void* params, bool pdl = false) const;

  // The same, and refuses a struct that is not as large as the kernel's: host and device code of different versions.
  template <class Params, std::enable_if_t<std::is_class_v<Params>, int> = 0>
  void launch(Grid grid, uint32_t block, uint32_t smem, uintptr_t stream, const Params& params,
              bool pdl = false) const {
    check_params_bytes(sizeof(Params));
    launch(grid.x, grid.y, grid.z, block, smem, stream, &params, pdl);
  }
  void check_params_bytes(size_t bytes) const;

  int device() const { return device_; }
  int registers() const { return registers_; }
  int local_bytes() const { return local_bytes_; }
  int static_smem() const { return static_smem_; }
  int occupancy(uint32_t block, uint32_t smem) const;  // CTAs that an SM holds at a time

 private:
  void allow_smem(uint32_t smem) const;

  std::string name_;
  int device_;
  bool has_pdl_;
  void* context_;
  void* function_ = nullptr;
  int registers_ = 0, local_bytes_ = 0, static_smem_ = 0;
  size_t params_bytes_ = 0;  // 0: the driver is too old to tell
  mutable std::atomic<uint32_t> allowed_smem_{0};
};

// A tensor of 16-bit elements, innermost dimension first, as the copy engine (TMA, SM90) reads boxes of it. An address
// and strides are multiples of 16 bytes. Rows of a box, 128 bytes, lie swizzled in shared memory; what is outside of
// the tensor is zero there.
struct BoxedTensor {
  uintptr_t address;
  std::array<uint64_t, 5> sizes;
  std::array<uint64_t, 4> strides;  // in bytes, of all dimensions but the innermost
  std::array<uint32_t, 5> box;

  bool operator==(const BoxedTensor& other) const {
    return address == other.address && sizes == other.sizes && strides == other.strides && box == other.box;
  }
};

cuda::TensorMap encode_tensor_map(const BoxedTensor& tensor, int device);

// Pinned memory for all devices, which use the same address; zeroed, never freed.
void* host_alloc(size_t bytes);

// Rows of equal size and distance in host memory, and where they go to on a device, one after the other.
struct HostCopy {
  uintptr_t dst;
  const char* src;
  size_t num_rows, row_bytes, row_stride;
};

// Queues copies, those to addresses that follow each other as one. The sources are read before the call returns, into
// pinned memory; nothing waits for the device.
void copy_to_device(const std::vector<HostCopy>& copies, uintptr_t stream, int device);

// Whether a CUDA graph is being captured from the stream.
bool is_capturing(uintptr_t stream, int device);

}  // namespace flashinfer_core
