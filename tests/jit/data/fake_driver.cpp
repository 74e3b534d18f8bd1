// Stands for libcuda.so.1 on machines without a GPU: two GPUs of compute capability 9.0 and 8.0. It prints what is
// launched and copied, and refuses what a driver refuses.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

using Handle = void*;

int contexts[2];  // whose addresses are the handles
Handle current = nullptr;

enum { kSuccess = 0, kInvalidValue = 1, kInvalidDevice = 101, kInvalidImage = 200, kNotFound = 500, kNotReady = 600 };

int launch(unsigned x, unsigned y, unsigned z, unsigned block, unsigned smem, Handle stream, void** arguments,
           const char* how) {
  if (block > 1024) return kInvalidValue;
  int64_t size = 0;
  std::memcpy(&size, static_cast<const char*>(arguments[0]) + 8, sizeof(size));
  std::printf("launch device=%d grid=%u,%u,%u block=%u smem=%u stream=%lu size=%ld %s\n",
              static_cast<int>(static_cast<int*>(current) - contexts), x, y, z, block, smem,
              reinterpret_cast<unsigned long>(stream), static_cast<long>(size), how);
  std::fflush(stdout);
  return kSuccess;
}

}  // namespace

extern "C" {

int cuInit(unsigned) { return std::getenv("FAKE_NO_DEVICE") ? 100 : kSuccess; }
int cuDriverGetVersion(int* version) { return *version = 12080, kSuccess; }
int cuGetErrorName(int error, const char** name) {
  *name = error == kInvalidValue    ? "CUDA_ERROR_INVALID_VALUE"
          : error == kInvalidDevice ? "CUDA_ERROR_INVALID_DEVICE"
          : error == kInvalidImage  ? "CUDA_ERROR_INVALID_IMAGE"
                                    : "CUDA_ERROR_NOT_FOUND";
  return kSuccess;
}
int cuGetErrorString(int, const char** text) { return *text = "of the fake driver", kSuccess; }
int cuDeviceGet(int* device, int index) {
  *device = index;
  return index >= 0 && index < 2 ? kSuccess : kInvalidDevice;
}
int cuDeviceGetCount(int* count) { return *count = 2, kSuccess; }
int cuDeviceGetName(char* name, int size, int device) {
  return std::snprintf(name, static_cast<size_t>(size), "Fake %d", device), kSuccess;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? (device == 0 ? 9 : 8) : attribute == 76 ? 0 : 1000 + attribute;
  return kSuccess;
}
int cuDevicePrimaryCtxRetain(Handle* context, int device) { return *context = &contexts[device], kSuccess; }
int cuCtxGetCurrent(Handle* context) { return *context = current, kSuccess; }
int cuCtxPushCurrent_v2(Handle context) { return current = context, kSuccess; }
int cuCtxPopCurrent_v2(Handle* context) { return *context = current, current = nullptr, kSuccess; }
int cuModuleLoadData(Handle* module, const char* image) {
  *module = &contexts[0];
  return std::memcmp(image, "refused", 7) == 0 ? kInvalidImage : kSuccess;
}
int cuModuleGetFunction(Handle* function, Handle, const char* name) {
  *function = &contexts[1];
  return std::strcmp(name, "absent") == 0 ? kNotFound : kSuccess;
}
int cuFuncGetAttribute(int* value, int attribute, Handle) {
  return *value = attribute == 8 ? 49152 : 10 + attribute, kSuccess;
}
int cuFuncSetAttribute(Handle, int attribute, int value) {
  if (attribute != 8 || value > 232448) return kInvalidValue;
  std::printf("shared memory raised to %d\n", value);
  std::fflush(stdout);
  return kSuccess;
}
int cuFuncGetParamInfo(Handle, size_t, size_t* offset, size_t* size) { return *offset = 0, *size = 16, kSuccess; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* ctas, Handle, int block, size_t smem) {
  return *ctas = static_cast<int>(2048 / block + smem), kSuccess;
}
int cuLaunchKernel(Handle, unsigned x, unsigned y, unsigned z, unsigned block, unsigned, unsigned, unsigned smem,
                   Handle stream, void** arguments, void**) {
  return launch(x, y, z, block, smem, stream, arguments, "plain");
}
struct Config {
  unsigned x, y, z, block, block_y, block_z, smem;
  Handle stream;
  int* attributes;
  unsigned num_attributes;
};
int cuLaunchKernelEx(const Config* config, Handle, void** arguments, void**) {
  const bool pdl = config->num_attributes == 1 && config->attributes[0] == 6 && config->attributes[2] == 1;
  return launch(config->x, config->y, config->z, config->block, config->smem, config->stream, arguments,
                pdl ? "pdl" : "unknown attributes");
}
int cuMemHostAlloc(void** address, size_t bytes, unsigned) {
  std::printf("pinned %zu\n", bytes);
  std::fflush(stdout);
  return *address = std::malloc(bytes), kSuccess;
}
int cuMemcpyHtoDAsync_v2(uintptr_t dst, const void* src, size_t bytes, Handle stream) {
  std::printf("copy bytes=%zu stream=%lu\n", bytes, reinterpret_cast<unsigned long>(stream));
  std::fflush(stdout);
  return std::memcpy(reinterpret_cast<void*>(dst), src, bytes), kSuccess;
}
int cuEventCreate(Handle* event, unsigned) { return *event = &contexts[0], kSuccess; }
int cuEventRecord(Handle, Handle) { return kSuccess; }
int cuEventQuery(Handle) { return std::getenv("FAKE_BUSY") ? kNotReady : kSuccess; }
int cuStreamIsCapturing(Handle, int* status) { return *status = 0, kSuccess; }
int cuGetExportTable(const void**, const void*) { return kNotFound; }  // NVRTC asks, and goes on without
int cuThreadExchangeStreamCaptureMode(int*) { return kSuccess; }

}  // extern "C"
