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

template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), int64_t blocks, int threads, int shared_bytes,
            cudaStream_t stream, const Args&... args) {
  if (blocks == 0) return;
  if (blocks > INT32_MAX) throw std::invalid_argument("tfla: too many rows");
  if (shared_bytes > 48 << 10) {  // what a kernel has without asking
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  }
  kernel<<<unsigned(blocks), unsigned(threads), unsigned(shared_bytes), stream>>>(Params(args)...);
  check(cudaGetLastError());
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
