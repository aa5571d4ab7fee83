// Calls of the CUDA runtime, checked; launches; and scratch memory, cut into arrays.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace flashcell::cuda {

inline void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // the error is reported here: it must not surface again elsewhere
  throw std::runtime_error(std::string("tfla: CUDA: ") + cudaGetErrorString(status));
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
  if (grid.blocks > INT32_MAX) throw std::invalid_argument("tfla: too many rows");
  if (grid.shared_bytes > 48 << 10) {  // what a kernel has without asking
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

// Hands out arrays one after another; without memory it only counts the bytes.
class Arrays {
 public:
  explicit Arrays(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <typename T>
  T* take(int64_t count) {
    T* array = reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += (count * int64_t(sizeof(T)) + 255) / 256 * 256;
    return array;
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* memory_;
  int64_t bytes_ = 0;
};

}  // namespace flashcell::cuda
