#include "host/cuda_attention.h"

#include <deque>
#include <mutex>

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
  const Grid grid{static_cast<uint32_t>(schedule_.num_ctas), 1, 1};
  kernel.kernel->launch(grid, kernel.threads, kernel.smem, stream, params);
}

}  // namespace flashinfer_core
