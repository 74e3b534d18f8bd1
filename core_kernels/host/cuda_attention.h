// A planned attention batch on a GPU. The lengths, the work list and all memory are the GPU's; here are their
// addresses.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "device/attention/params.h"
#include "host/driver.h"

namespace flashinfer_core {

// Where the kernels of a plan write what is wrong with lengths and pages that the host never saw: a slot of pinned
// memory. Slots are used again, the one that was given back first before others, since a kernel that is still under way
// may write to the slot of a plan that is gone.
class AttentionStatus {
 public:
  AttentionStatus();
  ~AttentionStatus();
  AttentionStatus(const AttentionStatus&) = delete;
  AttentionStatus& operator=(const AttentionStatus&) = delete;

  cuda::AttentionStatus* slot() const { return slot_; }

  // Returns what was reported since the last call. Does not wait for the GPU.
  std::optional<cuda::AttentionStatus> take();

 private:
  cuda::AttentionStatus* slot_;
};

// What a launch needs of a compiled attention kernel besides its parameters.
struct AttentionKernel {
  std::shared_ptr<CudaKernel> kernel;
  uint32_t ctas, threads, smem;
  std::shared_ptr<CudaKernel> merge;   // of partial states, after it; null if the kernel merges them itself
  int32_t block_keys, dim_qk, dim_vo;  // of the kernel for SM90; block_keys 0: the universal one
};

class CudaAttentionPlan {
 public:
  // `planned`: the parameters of a run, as far as they do not change between runs.
  CudaAttentionPlan(const cuda::ScheduleParams& schedule, const cuda::AttentionParams& planned)
      : schedule_(schedule), planned_(planned) {}

  // Queues the kernel that turns lengths into the work list.
  void schedule(const CudaKernel& kernel, uintptr_t stream) const;

  const cuda::AttentionParams& planned() const { return planned_; }

  // Whether a fault has been reported that nobody has taken.
  bool has_fault() const;

  // Queues a run; `params` are the planned ones, completed with tensors, scales and masks.
  void run(const AttentionKernel& kernel, uintptr_t stream, const cuda::AttentionParams& params) const;

 private:
  cuda::ScheduleParams schedule_;
  cuda::AttentionParams planned_;
};

}  // namespace flashinfer_core
