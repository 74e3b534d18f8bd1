#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cpu/kernels.h"

namespace flashinfer_core {

#define X(isa)                                      \
  namespace isa {                                   \
  void attention(const AttentionParams&);           \
  void merge_states(const MergeStatesParams&);      \
  void append_paged_kv(const AppendPagedKvParams&); \
  void norm(const NormParams&);                     \
  void rope(const RopeParams&);                     \
  void activation(const ActivationParams&);         \
  }
FIC_ISA_LIST
#undef X

namespace {

#define X(isa) {#isa, isa::attention, isa::merge_states, isa::append_paged_kv, isa::norm, isa::rope, isa::activation},
// Weakest first.
constexpr KernelTable kTables[] = {FIC_ISA_LIST};
#undef X

bool cpu_has(const std::string& isa) {
  if (isa == "baseline") return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (isa == "avx2") return avx2;
  if (isa == "avx512") return avx512;
  if (isa == "avx512_bf16") return avx512 && __builtin_cpu_supports("avx512bf16");
#endif
  return false;
}

const KernelTable& choose() {
  const char* wanted = std::getenv("FLASHINFER_CORE_CPU_ISA");
  const KernelTable* best = nullptr;
  std::string usable;
  for (const KernelTable& table : kTables) {
    if (!cpu_has(table.isa)) continue;
    usable += (usable.empty() ? "" : ", ") + std::string(table.isa);
    if (wanted == nullptr || *wanted == '\0' || std::string(wanted) == table.isa) best = &table;
  }
  if (best == nullptr) {
    throw std::runtime_error("FLASHINFER_CORE_CPU_ISA is '" + std::string(wanted) +
                             "'; this CPU and this build offer: " + usable);
  }
  return *best;
}

}  // namespace

const KernelTable& kernels() {
  static const KernelTable& table = choose();
  return table;
}

}  // namespace flashinfer_core
