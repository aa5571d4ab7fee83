// Finds out which of this library's code objects the driver runs on the current GPU, and names them
// in error messages. Exactly one source file of a kernel project includes this, after defining
// kKernelName; abi_check.py verifies that the others are compiled for the same architectures, or
// for those that build.toml names for engines that need one of them.
#pragma once
#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>

#include "common/cuda/check.cuh"
#include "common/cuda/code.h"

namespace flashcell::cuda {

// code_kernel is never launched. Its launch bounds tell the host which preprocessor conditions held
// in the code object that the driver has chosen: a kernel's other attributes do not distinguish 9.0
// from 9.0a.
constexpr int kAnyThreads = 32, kSm90aThreads = 64;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
static __global__ void __launch_bounds__(kSm90aThreads) code_kernel() {}
#else
static __global__ void __launch_bounds__(kAnyThreads) code_kernel() {}
#endif

// Throws an error that names the GPU if the library has no code for it.
static Code find_code() {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, code_kernel));
  // ptxVersion is __CUDA_ARCH__ / 10, also where the driver loads machine code.
  return {attributes.ptxVersion, attributes.maxThreadsPerBlock == kSm90aThreads};
}

// Returns ask(index) for the current GPU, cached for each GPU. If `ask` throws, nothing is cached
// and the next call asks again.
template <typename Fact>
Fact of_current_gpu(Fact (*ask)(int index)) {
  constexpr int kMost = 64;
  static std::atomic<const Fact*> known[kMost];
  int index = 0;
  check(cudaGetDevice(&index));
  if (index >= kMost) return ask(index);
  if (const Fact* fact = known[index].load(std::memory_order_acquire)) return *fact;
  auto fact = std::make_unique<const Fact>(ask(index));
  const Fact* before = nullptr;  // two threads may ask at the same time; the first answer is kept
  if (known[index].compare_exchange_strong(before, fact.get())) return *fact.release();
  return *before;
}

// Composes the error message for `what`, which has no code for the current GPU: `why` says how that
// is known, `otherwise` what else the user may do than take another build.
static std::string no_code(const std::string& what, const std::string& why,
                           const std::string& otherwise) {
  const auto text = [](int arch) {  // formats 90 as "9.0"
    return std::to_string(arch / 10) + "." + std::to_string(arch % 10);
  };
  int index = 0;
  cudaDeviceProp gpu{};
  if (cudaGetDevice(&index) == cudaSuccess) cudaGetDeviceProperties(&gpu, index);
  // Clear an error of the two calls above, after which only the GPU's name is missing.
  cudaGetLastError();
  const std::string capability = text(10 * gpu.major + gpu.minor);
  std::string archs;
  // Defined by nvcc: the architectures it compiles for.
  for (const int arch : {__CUDA_ARCH_LIST__}) {
    archs += (archs.empty() ? "" : ", ") + text(arch / 10);
  }
  const std::string remedy =
      10 * gpu.major + gpu.minor < 75
          ? "No build runs on GPUs before 7.5: "
          : "Take a build for this GPU (scripts/build_kernels --backend cuda --archs " +
                capability + (gpu.major == 9 ? "a" : "") + "), or ";
  return std::string(kKernelName) + ": " + what + " has no code for " + gpu.name +
         ", of compute capability " + capability + ": " + why +
         ", and the library was compiled for " + archs + ". " + remedy + otherwise + ".";
}

void fail(cudaError_t status) {
  // Clear the error, which is reported here, so that no later call reports it again.
  cudaGetLastError();
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
