// Calls of the CUDA runtime, checked.
#pragma once
#include <cuda_runtime.h>

namespace flashcell::cuda {

[[noreturn]] void fail(cudaError_t status);  // code.cuh

inline void check(cudaError_t status) {
  if (status != cudaSuccess) fail(status);
}

}  // namespace flashcell::cuda
