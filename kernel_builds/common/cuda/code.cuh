// Asks which code of this library the current GPU runs, and says so in errors. One source file of a
// kernel project, which has defined kKernelName, includes it and speaks for all: abi_check.py sees
// that all were compiled for the same archs.
#pragma once
#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>

#include "common/cuda/check.cuh"
#include "common/cuda/code.h"

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
static Code find_code() {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, code_kernel));
  // ptxVersion is __CUDA_ARCH__ / 10, of machine code as of PTX.
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

// What an error says of `what`, which has no code for the current GPU: how that is known, and what
// else one may do than take another build.
static std::string no_code(const std::string& what, const std::string& why,
                           const std::string& otherwise) {
  const auto text = [](int arch) {  // "9.0"
    return std::to_string(arch / 10) + "." + std::to_string(arch % 10);
  };
  int index = 0;
  cudaDeviceProp gpu{};
  if (cudaGetDevice(&index) == cudaSuccess) cudaGetDeviceProperties(&gpu, index);
  cudaGetLastError();  // of these two, whose failure only leaves the name out
  const std::string capability = text(10 * gpu.major + gpu.minor);
  std::string archs;
  for (const int arch : {__CUDA_ARCH_LIST__}) {  // nvcc's: what it compiles for
    archs += (archs.empty() ? "" : ", ") + text(arch / 10);
  }
  return std::string(kKernelName) + ": " + what + " has no code for " + gpu.name +
         ", of compute capability " + capability + ": " + why +
         ", and the library was compiled for " + archs +
         ". Take a build for this GPU (scripts/build_kernels --backend cuda --archs " + capability +
         (gpu.major == 9 ? "a" : "") + "), or " + otherwise + ".";
}

void fail(cudaError_t status) {
  cudaGetLastError();  // the error is reported here: it must not surface again elsewhere
  const std::string text = cudaGetErrorString(status);
  switch (status) {
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilationDisabled:
    case cudaErrorJitCompilerNotFound:
      throw std::runtime_error(
          no_code("this library", "CUDA says \"" + text + "\"", "ask for backend=\"reference\""));
    default:
      throw std::runtime_error(std::string(kKernelName) + ": CUDA: " + text);
  }
}

}  // namespace flashcell::cuda
