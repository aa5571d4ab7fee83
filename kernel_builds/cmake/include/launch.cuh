// Calls of the CUDA runtime, checked, and launches. The kernel project that includes this has
// defined kKernelName, which errors begin with.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace flashcell::cuda {

inline void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // the error is reported here: it must not surface again elsewhere
  throw std::runtime_error(std::string(kKernelName) + ": CUDA: " + cudaGetErrorString(status));
}

struct Grid {
  int64_t blocks;
  int threads, shared_bytes;
  cudaStream_t stream;
  bool early = false;  // starts before the kernel ahead of it has ended, and waits for it inside
};

template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), const Grid& grid, const Args&... args) {
  if (grid.blocks == 0) return;
  if (grid.blocks > INT32_MAX) {
    throw std::invalid_argument(std::string(kKernelName) + ": too many sequences");
  }
  // A kernel has 48 KB without asking, of which its static arrays may take 16.
  if (grid.shared_bytes > 32 << 10) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               grid.shared_bytes));
  }
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = unsigned(grid.blocks), config.blockDim = unsigned(grid.threads);
  config.dynamicSmemBytes = size_t(grid.shared_bytes), config.stream = grid.stream;
  config.attrs = &early, config.numAttrs = grid.early ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, Params(args)...));
}

}  // namespace flashcell::cuda
