#include "host/threads.h"

#include <dlfcn.h>

#include <initializer_list>

namespace flashinfer_core {
namespace {

struct OpenMP {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;  // GOMP_parallel
  int (*max_threads)() = nullptr;                                          // omp_get_max_threads
  const char* path = "";

  OpenMP() {
    if (bind(RTLD_DEFAULT)) return;
    for (const char* library : {"libtorch_cpu.so", "libgomp.so.1", "libomp.so", "libiomp5.so"}) {
      void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
      if (handle != nullptr && bind(handle)) return;
    }
  }

  bool bind(void* handle) {
    void* parallel_symbol = dlsym(handle, "GOMP_parallel");
    void* max_threads_symbol = dlsym(handle, "omp_get_max_threads");
    if (parallel_symbol == nullptr || max_threads_symbol == nullptr) return false;
    parallel = reinterpret_cast<decltype(parallel)>(parallel_symbol);
    max_threads = reinterpret_cast<decltype(max_threads)>(max_threads_symbol);
    Dl_info info;
    if (dladdr(parallel_symbol, &info) != 0 && info.dli_fname != nullptr) path = info.dli_fname;
    return true;
  }
};

// Bound on first use and not at load time: torch may be imported after the extension.
const OpenMP& runtime() {
  static const OpenMP openmp;
  return openmp;
}

}  // namespace

int max_threads() { return runtime().max_threads == nullptr ? 1 : runtime().max_threads(); }

void run_team(int num_threads, void (*body)(void*), void* arg) {
  if (num_threads <= 1 || runtime().parallel == nullptr) {
    body(arg);
  } else {
    runtime().parallel(body, arg, static_cast<unsigned>(num_threads), 0);
  }
}

const char* openmp_runtime() { return runtime().path; }

}  // namespace flashinfer_core
