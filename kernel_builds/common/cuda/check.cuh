// Checks the result of a call of the CUDA runtime and throws on failure.
#pragma once
#include <cuda_runtime.h>

namespace flashcell::cuda {

[[noreturn]] void fail(cudaError_t status);  // defined in code.cuh

inline void check(cudaError_t status) {
  if (status != cudaSuccess) fail(status);
}

}  // namespace flashcell::cuda
