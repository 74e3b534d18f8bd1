#include "host/cuda_attention.h"

#include <deque>
#include <mutex>
#include <numeric>
#include <unordered_map>

#include "device/attention/params_sm90.h"

namespace flashinfer_core {
namespace {

constexpr int kSlotsAtATime = 256;

struct SlotPool {
  std::mutex mutex;
  std::deque<cuda::AttentionStatus*> free;
};

SlotPool& slot_pool() {
  static SlotPool pool;
  return pool;
}

struct AddressHash {
  size_t operator()(const BoxedTensor& tensor) const { return std::hash<uintptr_t>()(tensor.address); }
};

// Tensor maps by what they describe: to make one costs more than to find it. Caches and activations come back at the
// same addresses; should there be very many, the old ones are forgotten.
class TensorMaps {
 public:
  explicit TensorMaps(int device) : device_(device) {}

  cuda::TensorMap find(const BoxedTensor& tensor) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = maps_.find(tensor);
    if (found != maps_.end()) return found->second;
    if (maps_.size() == kMost) maps_.clear();
    return maps_.emplace(tensor, encode_tensor_map(tensor, device_)).first->second;
  }

 private:
  static constexpr size_t kMost = 4096;
  const int device_;
  std::mutex mutex_;
  std::unordered_map<BoxedTensor, cuda::TensorMap, AddressHash> maps_;
};

TensorMaps& tensor_maps(int device) {
  static std::mutex mutex;
  static std::unordered_map<int, TensorMaps> maps;  // whose elements stay where they are
  const std::lock_guard<std::mutex> lock(mutex);
  return maps.try_emplace(device, device).first->second;
}

// Keys or values as the kernel for SM90 takes them, see AttentionSm90Params. The stride of a dimension of one means
// nothing, but has to be a valid one.
BoxedTensor boxed(const cuda::AttentionParams& p, const void* address, int64_t stride_page, int64_t stride_slot,
                  int64_t stride_head, int32_t dim, int32_t box_keys) {
  const bool paged = p.page_table != nullptr;
  const auto bytes = [](int64_t size, int64_t stride) {
    return size == 1 ? uint64_t{16} : static_cast<uint64_t>(stride) * 2;
  };
  const int64_t slots = paged ? p.page_size : p.num_pages, pages = paged ? p.num_pages : 1;
  return {reinterpret_cast<uintptr_t>(address),
          {64, static_cast<uint64_t>(slots), static_cast<uint64_t>(dim / 64), static_cast<uint64_t>(p.num_kv_heads),
           static_cast<uint64_t>(pages)},
          {bytes(slots, paged ? stride_slot : stride_page), 128, bytes(p.num_kv_heads, stride_head),
           bytes(pages, stride_page)},
          {64, static_cast<uint32_t>(box_keys), 1, 1, 1}};
}

cuda::AttentionSm90Params with_maps(const AttentionKernel& kernel, const cuda::AttentionParams& p) {
  cuda::AttentionSm90Params complete{};
  static_cast<cuda::AttentionParams&>(complete) = p;
  complete.box_keys = p.page_table == nullptr ? kernel.block_keys : std::gcd(kernel.block_keys, p.page_size);
  TensorMaps& maps = tensor_maps(kernel.kernel->device());
  complete.k_map =
      maps.find(boxed(p, p.k, p.k_stride_page, p.k_stride_slot, p.k_stride_head, kernel.dim_qk, complete.box_keys));
  complete.v_map =
      maps.find(boxed(p, p.v, p.v_stride_page, p.v_stride_slot, p.v_stride_head, kernel.dim_vo, complete.box_keys));
  return complete;
}

// The GPU writes the fault last.
bool is_reported(const cuda::AttentionStatus& status) {
  return __atomic_load_n(&status.fault, __ATOMIC_ACQUIRE) != cuda::Fault::none;
}

}  // namespace

AttentionStatus::AttentionStatus() {
  SlotPool& pool = slot_pool();
  const std::lock_guard<std::mutex> lock(pool.mutex);
  if (pool.free.empty()) {
    auto* slots = static_cast<cuda::AttentionStatus*>(host_alloc(kSlotsAtATime * sizeof(cuda::AttentionStatus)));
    for (int i = 0; i < kSlotsAtATime; ++i) pool.free.push_back(slots + i);
  }
  slot_ = pool.free.front();
  pool.free.pop_front();
  *slot_ = {};
}

AttentionStatus::~AttentionStatus() {
  SlotPool& pool = slot_pool();
  const std::lock_guard<std::mutex> lock(pool.mutex);
  pool.free.push_back(slot_);
}

std::optional<cuda::AttentionStatus> AttentionStatus::take() {
  if (!is_reported(*slot_)) return std::nullopt;
  const cuda::AttentionStatus found = *slot_;
  __atomic_store_n(&slot_->fault, cuda::Fault::none, __ATOMIC_RELEASE);
  return found;
}

void CudaAttentionPlan::schedule(const CudaKernel& kernel, uintptr_t stream) const {
  if (schedule_.num_requests > 0) kernel.launch(Grid{1, 1, 1}, cuda::kScheduleThreads, 0, stream, schedule_);
}

bool CudaAttentionPlan::has_fault() const { return is_reported(*planned_.status); }

void CudaAttentionPlan::run(const AttentionKernel& kernel, uintptr_t stream,
                            const cuda::AttentionParams& params) const {
  if (params.num_requests == 0 || params.q_tokens == 0) return;
  const Grid grid{kernel.ctas, 1, 1};
  if (kernel.block_keys == 0) {
    kernel.kernel->launch(grid, kernel.threads, kernel.smem, stream, params);
  } else {
    kernel.kernel->launch(grid, kernel.threads, kernel.smem, stream, with_maps(kernel, params));
  }
  if (kernel.merge != nullptr && schedule_.num_slots > 0) {
    const Grid slots{static_cast<uint32_t>(schedule_.num_slots), 1, 1};
    kernel.merge->launch(slots, cuda::kMergeThreads, 0, stream, params, true);
  }
}

}  // namespace flashinfer_core
