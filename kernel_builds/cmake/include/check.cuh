// Calls of the CUDA runtime, checked. The kernel project that includes this has defined
// kKernelName, which errors begin with.
#pragma once
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace flashcell::cuda {

inline std::string arch_text(int arch) {  // "9.0"
  return std::to_string(arch / 10) + "." + std::to_string(arch % 10);
}

// The error of `what`, which has no code for the current GPU. `why` says what CUDA or the plan
// found.
inline std::string no_code(const std::string& what, const std::string& why) {
  int index = 0;
  cudaDeviceProp gpu{};
  if (cudaGetDevice(&index) == cudaSuccess) cudaGetDeviceProperties(&gpu, index);
  cudaGetLastError();  // of these two, whose failure only leaves the name out
  const std::string capability = arch_text(10 * gpu.major + gpu.minor);
  std::string archs;
  for (const int arch : {__CUDA_ARCH_LIST__}) {  // nvcc's: what it compiles for
    archs += (archs.empty() ? "" : ", ") + arch_text(arch / 10);
  }
  return std::string(kKernelName) + ": " + what + " has no code for " + gpu.name +
         ", of compute capability " + capability + ": " + why +
         ", and this library was compiled for " + archs +
         ". Take a build for this GPU (scripts/build_kernels --backend cuda --archs " + capability +
         (gpu.major == 9 ? "a" : "") + ")";
}

inline void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // the error is reported here: it must not surface again elsewhere
  const std::string text = cudaGetErrorString(status);
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction ||
      status == cudaErrorUnsupportedPtxVersion) {
    throw std::runtime_error(no_code("no op", "CUDA says \"" + text + "\"") +
                             ", or ask for backend=\"reference\".");
  }
  throw std::runtime_error(std::string(kKernelName) + ": CUDA: " + text);
}

}  // namespace flashcell::cuda
