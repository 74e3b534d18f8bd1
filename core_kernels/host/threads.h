// One thread team for the whole process: torch's.
//
// The extension links no OpenMP runtime. A second runtime beside torch's would keep its own idle threads, and idle
// OpenMP threads spin: on a machine with as many threads as cores the two teams then steal each other's time slices.
// So the entry points of the runtime that torch has loaded are looked up by name, in the order in which the dynamic
// loader binds them for torch itself: global scope first (LD_PRELOAD, libtorch_global_deps), then libtorch_cpu's own
// dependencies. GNU, LLVM and Intel runtimes all export the GNU names.
#pragma once

namespace flashinfer_core {

// What torch.get_num_threads() returns on the calling thread; 1 if no OpenMP runtime is loaded.
int max_threads();

// Calls body(arg) once on each of num_threads threads of the team and returns when all are done.
void run_team(int num_threads, void (*body)(void*), void* arg);

// The path of the shared object whose runtime is used, "" if none is loaded.
const char* openmp_runtime();

}  // namespace flashinfer_core
