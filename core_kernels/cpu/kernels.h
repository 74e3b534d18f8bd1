// The table of CPU kernels: one entry an operation, filled once for each instruction set, chosen at run time.
#pragma once

#include "cpu/params.h"
#include "device/activation/params.h"
#include "device/cascade/params.h"
#include "device/norm/params.h"
#include "device/page/params.h"
#include "device/rope/params.h"

namespace flashinfer_core {

struct KernelTable {
  const char* isa;
  void (*attention)(const AttentionParams&);
  void (*merge_states)(const MergeStatesParams&);
  void (*append_paged_kv)(const AppendPagedKvParams&);
  void (*norm)(const NormParams&);
  void (*rope)(const RopeParams&);
  void (*activation)(const ActivationParams&);
};

// The table for this machine: the best instruction set that the CPU has, or the one that the environment variable
// FLASHINFER_CORE_CPU_ISA names. Throws std::runtime_error if that one is unknown or the CPU lacks it.
const KernelTable& kernels();

}  // namespace flashinfer_core
