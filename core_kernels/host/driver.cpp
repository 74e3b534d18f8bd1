#include "host/driver.h"

#include <dlfcn.h>

#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <stdexcept>

namespace flashinfer_core {
namespace {

// What this file uses of the driver's interface, which NVIDIA keeps binary compatible. Handles are opaque pointers.
using Result = int;  // 0: success
using Context = void*;
using Module = void*;
using Function = void*;
using Stream = void*;
using Event = void*;

enum DeviceAttribute {
  kMultiprocessorCount = 16,
  kL2CacheSize = 38,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kMaxSharedMemoryPerMultiprocessor = 81,
  kMaxSharedMemoryPerBlockOptin = 97,
};
enum FunctionAttribute { kSharedSizeBytes = 1, kLocalSizeBytes = 3, kNumRegs = 4, kMaxDynamicSharedSizeBytes = 8 };
enum HostAllocFlag : unsigned { kPortable = 1, kDeviceMap = 2 };
constexpr int kCaptureModeRelaxed = 2;
constexpr int kProgrammaticStreamSerialization = 6;  // CUlaunchAttributeID
constexpr unsigned kEventDisableTiming = 2;
constexpr int kElement16 = 1, kNotInterleaved = 0, kSwizzle128 = 3, kPromoteTo256 = 3,
              kZerosOutside = 0;  // CUtensorMap
constexpr Result kErrorNoDevice = 100, kErrorNotReady = 600;

struct LaunchAttribute {  // CUlaunchAttribute
  int id;
  int padding;
  union {
    int value;
    char bytes[64];
  };
};
static_assert(sizeof(LaunchAttribute) == 72);

struct LaunchConfig {  // CUlaunchConfig
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, smem;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};
static_assert(offsetof(LaunchConfig, stream) == 32 && sizeof(LaunchConfig) == 56);

struct Driver {
  void* library = nullptr;
  std::string missing;  // why a needed function is not there

  Result (*init)(unsigned);
  Result (*driver_get_version)(int*);
  Result (*get_error_name)(Result, const char**);
  Result (*get_error_string)(Result, const char**);
  Result (*device_get)(int*, int);
  Result (*device_get_count)(int*);
  Result (*device_get_name)(char*, int, int);
  Result (*device_get_attribute)(int*, int, int);
  Result (*primary_ctx_retain)(Context*, int);
  Result (*ctx_get_current)(Context*);
  Result (*ctx_push_current)(Context);
  Result (*ctx_pop_current)(Context*);
  Result (*module_load_data)(Module*, const void*);
  Result (*module_get_function)(Function*, Module, const char*);
  Result (*func_get_attribute)(int*, int, Function);
  Result (*func_set_attribute)(Function, int, int);
  Result (*occupancy)(int*, Function, int, size_t);
  Result (*launch_kernel)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream,
                          void**, void**);
  Result (*mem_host_alloc)(void**, size_t, unsigned);
  Result (*memcpy_htod_async)(uintptr_t, const void*, size_t, Stream);
  Result (*event_create)(Event*, unsigned);
  Result (*event_record)(Event, Stream);
  Result (*event_query)(Event);
  Result (*stream_is_capturing)(Stream, int*);
  Result (*exchange_capture_mode)(int*);
  // Null in older drivers.
  Result (*launch_kernel_ex)(const LaunchConfig*, Function, void**, void**);  // CUDA 11.8
  Result (*tensor_map_encode)(cuda::TensorMap*, int, uint32_t, uintptr_t, const uint64_t*, const uint64_t*,
                              const uint32_t*, const uint32_t*, int, int, int, int);  // CUDA 12.0
  Result (*func_get_param_info)(Function, size_t, size_t*, size_t*);                  // CUDA 12.4

  Driver() {
    library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* why = dlerror();
      missing = why == nullptr ? "libcuda.so.1 cannot be loaded" : why;
      return;
    }
    need(init, "cuInit");
    need(driver_get_version, "cuDriverGetVersion");
    need(get_error_name, "cuGetErrorName");
    need(get_error_string, "cuGetErrorString");
    need(device_get, "cuDeviceGet");
    need(device_get_count, "cuDeviceGetCount");
    need(device_get_name, "cuDeviceGetName");
    need(device_get_attribute, "cuDeviceGetAttribute");
    need(primary_ctx_retain, "cuDevicePrimaryCtxRetain");
    need(ctx_get_current, "cuCtxGetCurrent");
    need(ctx_push_current, "cuCtxPushCurrent_v2");
    need(ctx_pop_current, "cuCtxPopCurrent_v2");
    need(module_load_data, "cuModuleLoadData");
    need(module_get_function, "cuModuleGetFunction");
    need(func_get_attribute, "cuFuncGetAttribute");
    need(func_set_attribute, "cuFuncSetAttribute");
    need(occupancy, "cuOccupancyMaxActiveBlocksPerMultiprocessor");
    need(launch_kernel, "cuLaunchKernel");
    need(mem_host_alloc, "cuMemHostAlloc");
    need(memcpy_htod_async, "cuMemcpyHtoDAsync_v2");
    need(event_create, "cuEventCreate");
    need(event_record, "cuEventRecord");
    need(event_query, "cuEventQuery");
    need(stream_is_capturing, "cuStreamIsCapturing");
    need(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
    find(launch_kernel_ex, "cuLaunchKernelEx");
    find(tensor_map_encode, "cuTensorMapEncodeTiled");
    find(func_get_param_info, "cuFuncGetParamInfo");
  }

  template <class Entry>
  void find(Entry& entry, const char* name) {
    entry = reinterpret_cast<Entry>(dlsym(library, name));
  }

  template <class Entry>
  void need(Entry& entry, const char* name) {
    find(entry, name);
    if (entry == nullptr) missing = std::string("libcuda.so.1 lacks ") + name;
  }
};

const Driver& library() {
  static const Driver driver;
  return driver;
}

[[noreturn]] void fail(const char* function, Result result, const std::string& detail = "") {
  const char *name = nullptr, *description = nullptr;
  library().get_error_name(result, &name);
  library().get_error_string(result, &description);
  throw std::runtime_error(std::string(function) + ": " +
                           (name == nullptr ? "CUDA error " + std::to_string(result) : name) + " (" +
                           (description == nullptr ? "unknown" : description) + ")" + detail);
}

void check(const char* function, Result result) {
  if (result != 0) fail(function, result);
}

// The driver, ready for use.
const Driver& ready() {
  const Driver& driver = library();
  if (!driver.missing.empty()) {
    throw std::runtime_error("CUDA: expected an NVIDIA driver, got none (" + driver.missing +
                             "); install the NVIDIA driver for this GPU, or pass CPU tensors");
  }
  static const Result initialized = driver.init(0);
  check("cuInit", initialized);
  return driver;
}

struct Device {
  CudaDevice properties;
  Context context;  // primary, retained for the life of the process
};

Device open_device(int index) {
  const Driver& driver = ready();
  int handle = 0;
  check("cuDeviceGet", driver.device_get(&handle, index));
  const auto attribute = [&](DeviceAttribute which) {
    int value = 0;
    check("cuDeviceGetAttribute", driver.device_get_attribute(&value, which, handle));
    return value;
  };
  char name[256] = "";
  check("cuDeviceGetName", driver.device_get_name(name, sizeof(name), handle));
  Device device{};
  device.properties = {attribute(kComputeCapabilityMajor) * 10 + attribute(kComputeCapabilityMinor),
                       attribute(kMultiprocessorCount),
                       attribute(kMaxSharedMemoryPerBlockOptin),
                       attribute(kMaxSharedMemoryPerMultiprocessor),
                       static_cast<size_t>(attribute(kL2CacheSize)),
                       name};
  return device;
}

const Device& device_at(int index, bool with_context) {
  static std::mutex mutex;
  static std::map<int, Device> devices;  // whose elements stay where they are
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = devices.find(index);
  if (found == devices.end()) found = devices.emplace(index, open_device(index)).first;
  Device& device = found->second;
  if (with_context && device.context == nullptr) {
    int handle = 0;
    check("cuDeviceGet", ready().device_get(&handle, index));
    check("cuDevicePrimaryCtxRetain", ready().primary_ctx_retain(&device.context, handle));
  }
  return device;
}

// Makes a context current while it lives.
class Current {
 public:
  explicit Current(Context context) {
    Context current = nullptr;
    check("cuCtxGetCurrent", library().ctx_get_current(&current));
    if (current == context) return;
    check("cuCtxPushCurrent", library().ctx_push_current(context));
    pushed_ = true;
  }
  ~Current() {
    Context popped = nullptr;
    if (pushed_) library().ctx_pop_current(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  bool pushed_ = false;
};

// While it lives, this thread may load modules and allocate although a stream is being captured.
class RelaxedCapture {
 public:
  RelaxedCapture() { check("cuThreadExchangeStreamCaptureMode", library().exchange_capture_mode(&mode_)); }
  ~RelaxedCapture() { library().exchange_capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int mode_ = kCaptureModeRelaxed;
};

Stream stream_handle(uintptr_t stream) { return reinterpret_cast<Stream>(stream); }

// Blocks of pinned memory for copies to one device, whose context is current in each call. A block is free again when
// the copies from it are done; while all are in use there are new ones, so that nothing waits.
class StagingPool {
 public:
  struct Block {
    char* memory;
    size_t bytes;
    Event copied;
  };

  Block take(size_t bytes) {
    const RelaxedCapture relaxed;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto block = free_.begin(); block != free_.end(); ++block) {
      if (block->bytes < bytes) continue;
      const Result state = library().event_query(block->copied);
      if (state == kErrorNotReady) continue;
      check("cuEventQuery", state);
      const Block found = *block;
      free_.erase(block);
      return found;
    }
    size_t size = kLeastBytes;
    while (size < bytes) size *= 2;
    Block made{static_cast<char*>(host_alloc(size)), size, nullptr};
    check("cuEventCreate", library().event_create(&made.copied, kEventDisableTiming));
    return made;
  }

  // To be called when the copies from a block are queued.
  void give_back(const Block& block, Stream stream) {
    check("cuEventRecord", library().event_record(block.copied, stream));
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(block);
  }

 private:
  static constexpr size_t kLeastBytes = 1 << 16;
  std::mutex mutex_;
  std::list<Block> free_;  // or soon to be, the one that was used first in front
};

StagingPool& staging_pool(int device) {
  static std::mutex mutex;
  static std::map<int, StagingPool> pools;  // whose elements stay where they are
  const std::lock_guard<std::mutex> lock(mutex);
  return pools[device];
}

}  // namespace

std::optional<int> cuda_driver_version() {
  int version = 0;
  if (!library().missing.empty() || library().driver_get_version(&version) != 0) return std::nullopt;
  return version;
}

int cuda_device_count() {
  const Driver& driver = library();
  if (driver.missing.empty() && driver.init(0) == kErrorNoDevice) return 0;
  int count = 0;
  check("cuDeviceGetCount", ready().device_get_count(&count));
  return count;
}

const CudaDevice& cuda_device(int index) { return device_at(index, false).properties; }

CudaKernel::CudaKernel(const void* cubin, const std::string& name, int device) : name_(name), device_(device) {
  const Device& on = device_at(device, true);
  const Driver& driver = library();
  context_ = on.context;
  // Streams that are captured take such launches from CUDA 12.3 on.
  has_pdl_ = on.properties.compute_capability >= 90 && driver.launch_kernel_ex != nullptr &&
             cuda_driver_version().value_or(0) >= 12030;
  const Current current(context_);
  const RelaxedCapture relaxed;
  Module module = nullptr;
  check("cuModuleLoadData", driver.module_load_data(&module, cubin));
  check("cuModuleGetFunction", driver.module_get_function(&function_, module, name.c_str()));
  // The driver loads a kernel when it is first used: these questions make that happen here and not in a launch.
  const auto attribute = [&](FunctionAttribute which) {
    int value = 0;
    check("cuFuncGetAttribute", driver.func_get_attribute(&value, which, function_));
    return value;
  };
  registers_ = attribute(kNumRegs);
  local_bytes_ = attribute(kLocalSizeBytes);
  static_smem_ = attribute(kSharedSizeBytes);
  allowed_smem_ = static_cast<uint32_t>(attribute(kMaxDynamicSharedSizeBytes));
  if (driver.func_get_param_info != nullptr) {
    size_t offset = 0;
    check("cuFuncGetParamInfo", driver.func_get_param_info(function_, 0, &offset, &params_bytes_));
  }
}

void CudaKernel::check_params_bytes(size_t bytes) const {
  if (params_bytes_ != 0 && bytes != params_bytes_) {
    throw std::runtime_error("params: expected the " + std::to_string(params_bytes_) + " bytes of kernel " + name_ +
                             ", got " + std::to_string(bytes) +
                             "; the extension and its device code differ in version, install the library again");
  }
}

void CudaKernel::allow_smem(uint32_t smem) const {
  if (smem <= allowed_smem_.load(std::memory_order_relaxed)) return;
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  if (smem <= allowed_smem_.load(std::memory_order_relaxed)) return;  // so no other thread lowers it again
  const Result result = library().func_set_attribute(function_, kMaxDynamicSharedSizeBytes, static_cast<int>(smem));
  if (result != 0) {
    fail("cuFuncSetAttribute", result, ": kernel " + name_ + ", " + std::to_string(smem) + " bytes of shared memory");
  }
  allowed_smem_.store(smem, std::memory_order_relaxed);
}

void CudaKernel::launch(uint32_t grid_x, uint32_t grid_y, uint32_t grid_z, uint32_t block, uint32_t smem,
                        uintptr_t stream, const void* params, bool pdl) const {
  const Current current(context_);
  allow_smem(smem);
  void* arguments[] = {const_cast<void*>(params)};
  Result result = 0;
  if (pdl && has_pdl_) {
    LaunchAttribute attribute{};
    attribute.id = kProgrammaticStreamSerialization;
    attribute.value = 1;
    const LaunchConfig config{grid_x, grid_y, grid_z, block, 1, 1, smem, stream_handle(stream), &attribute, 1};
    result = library().launch_kernel_ex(&config, function_, arguments, nullptr);
  } else {
    result = library().launch_kernel(function_, grid_x, grid_y, grid_z, block, 1, 1, smem, stream_handle(stream),
                                     arguments, nullptr);
  }
  if (result != 0) {
    const auto number = [](uint32_t n) { return std::to_string(n); };
    fail("cuLaunchKernel", result,
         ": kernel " + name_ + ", grid " + number(grid_x) + " x " + number(grid_y) + " x " + number(grid_z) +
             ", block " + number(block) + ", " + number(smem) + " bytes of shared memory");
  }
}

int CudaKernel::occupancy(uint32_t block, uint32_t smem) const {
  const Current current(context_);
  allow_smem(smem);
  int ctas = 0;
  check("cuOccupancyMaxActiveBlocksPerMultiprocessor",
        library().occupancy(&ctas, function_, static_cast<int>(block), smem));
  return ctas;
}

cuda::TensorMap encode_tensor_map(const BoxedTensor& tensor, int device) {
  const Current current(device_at(device, true).context);
  if (library().tensor_map_encode == nullptr) {
    throw std::runtime_error("cuTensorMapEncodeTiled: expected a driver for CUDA 12.0 or later, got an older one");
  }
  cuda::TensorMap map{};
  const std::array<uint32_t, 5> every_element = {1, 1, 1, 1, 1};
  check("cuTensorMapEncodeTiled",
        library().tensor_map_encode(&map, kElement16, static_cast<uint32_t>(tensor.sizes.size()), tensor.address,
                                    tensor.sizes.data(), tensor.strides.data(), tensor.box.data(), every_element.data(),
                                    kNotInterleaved, kSwizzle128, kPromoteTo256, kZerosOutside));
  return map;
}

void* host_alloc(size_t bytes) {
  const Driver& driver = ready();
  Context context = nullptr;
  check("cuCtxGetCurrent", driver.ctx_get_current(&context));
  const Current current(context == nullptr ? device_at(0, true).context : context);
  const RelaxedCapture relaxed;
  void* address = nullptr;
  check("cuMemHostAlloc", driver.mem_host_alloc(&address, bytes, kPortable | kDeviceMap));
  std::memset(address, 0, bytes);
  return address;
}

void copy_to_device(const std::vector<HostCopy>& copies, uintptr_t stream, int device) {
  size_t bytes = 0;
  for (const HostCopy& copy : copies) bytes += copy.num_rows * copy.row_bytes;
  if (bytes == 0) return;
  const Current current(device_at(device, true).context);
  StagingPool& pool = staging_pool(device);
  StagingPool::Block block = pool.take(bytes);
  char *first = block.memory, *next = first;  // of what the next copy of the driver takes
  uintptr_t first_dst = copies.front().dst;
  const auto flush = [&] {
    const size_t size = static_cast<size_t>(next - first);
    if (size > 0) {
      check("cuMemcpyHtoDAsync", library().memcpy_htod_async(first_dst, first, size, stream_handle(stream)));
    }
    first = next;
  };
  for (const HostCopy& copy : copies) {
    if (copy.dst != first_dst + static_cast<size_t>(next - first)) {
      flush();
      first_dst = copy.dst;
    }
    for (size_t row = 0; row < copy.num_rows; ++row, next += copy.row_bytes) {
      std::memcpy(next, copy.src + row * copy.row_stride, copy.row_bytes);
    }
  }
  flush();
  pool.give_back(block, stream_handle(stream));
}

bool is_capturing(uintptr_t stream, int device) {
  const Current current(device_at(device, true).context);
  int status = 0;
  check("cuStreamIsCapturing", library().stream_is_capturing(stream_handle(stream), &status));
  return status != 0;
}

}  // namespace flashinfer_core
