// Calls of the CUDA runtime, checked, and launches.
#pragma once
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace flashcell::cuda {

inline void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // the error is reported here: it must not surface again elsewhere
  throw std::runtime_error(std::string("diagonal_rnn: CUDA: ") + cudaGetErrorString(status));
}

struct Grid {
  int64_t blocks;
  int threads, shared_bytes;
  cudaStream_t stream;
  bool early = false;   // starts before the kernel ahead of it has ended, and waits for it inside
  int64_t columns = 1;  // blocks in the grid's second dimension
  int cluster = 1;      // blocks that share their memory
};

template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), const Grid& grid, const Args&... args) {
  if (grid.blocks == 0) return;
  if (grid.blocks > INT32_MAX) throw std::invalid_argument("diagonal_rnn: too many sequences");
  if (grid.shared_bytes > 48 << 10) {  // what a kernel has without asking
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               grid.shared_bytes));
  }
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (grid.early) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {unsigned(grid.cluster), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = {unsigned(grid.blocks), unsigned(grid.columns), 1};
  config.blockDim = unsigned(grid.threads);
  config.dynamicSmemBytes = size_t(grid.shared_bytes), config.stream = grid.stream;
  config.attrs = attributes, config.numAttrs = count;
  check(cudaLaunchKernelEx(&config, kernel, Params(args)...));
}

}  // namespace flashcell::cuda
