// Asks which code of this library the current GPU runs. One source file of a kernel project
// includes it and speaks for all: abi_check.py sees that all were compiled for the same archs.
#pragma once
#include <atomic>
#include <memory>

#include "check.cuh"
#include "code.h"

namespace flashcell::cuda {

// Nobody launches it. Its launch bounds tell the host which preprocessor conditions held in the
// code that the driver has chosen: the attributes of a kernel do not say 9.0 from 9.0a.
constexpr int kAnyThreads = 32, kSm90aThreads = 64;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
static __global__ void __launch_bounds__(kSm90aThreads) code_kernel() {}
#else
static __global__ void __launch_bounds__(kAnyThreads) code_kernel() {}
#endif

// An error that names the GPU where the library has no code for it.
inline Code find_code() {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, code_kernel));
  // Of PTX and of machine code alike this is the arch of the compiler's front end.
  return {attributes.ptxVersion, attributes.maxThreadsPerBlock == kSm90aThreads};
}

// What `ask(index)` says of the current GPU, asked once. What fails is asked again.
template <typename Fact>
Fact of_current_gpu(Fact (*ask)(int index)) {
  constexpr int kMost = 64;
  static std::atomic<const Fact*> known[kMost];
  int index = 0;
  check(cudaGetDevice(&index));
  if (index >= kMost) return ask(index);
  if (const Fact* fact = known[index].load(std::memory_order_acquire)) return *fact;
  auto fact = std::make_unique<const Fact>(ask(index));
  const Fact* before = nullptr;  // two threads may ask at once; the first answer stays
  if (known[index].compare_exchange_strong(before, fact.get())) return *fact.release();
  return *before;
}

}  // namespace flashcell::cuda
