// Launches kernels and checks the result. The including kernel project defines kKernelName first,
// with which error messages begin.
#pragma once
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/cuda/check.cuh"

namespace flashcell::cuda {

struct Grid {
  int64_t blocks;
  int threads, shared_bytes;
  cudaStream_t stream;
  bool pdl = false;  // programmatic dependent launch: starts before the preceding kernel has ended
  int cluster = 1;   // thread blocks in a cluster
  // The most shared memory that a launch of the kernel asks for, where that differs by the call:
  // what is allowed is the kernel's, and other threads launch it too.
  int most_shared_bytes = 0;
};

template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), const Grid& grid, const Args&... args) {
  if (grid.blocks == 0) return;
  if (grid.blocks > INT32_MAX) {
    throw std::invalid_argument(std::string(kKernelName) + ": too many sequences");
  }
  // A kernel may use 48 KB without opting in; its static arrays may take up to 16 KB of them.
  if (grid.shared_bytes > 32 << 10) {
    const int most = std::max(grid.shared_bytes, grid.most_shared_bytes);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
  }
  cudaLaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (grid.pdl) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = unsigned(grid.cluster);
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = unsigned(grid.blocks), config.blockDim = unsigned(grid.threads);
  config.dynamicSmemBytes = size_t(grid.shared_bytes), config.stream = grid.stream;
  config.attrs = attributes, config.numAttrs = count;
  check(cudaLaunchKernelEx(&config, kernel, Params(args)...));
}

}  // namespace flashcell::cuda
