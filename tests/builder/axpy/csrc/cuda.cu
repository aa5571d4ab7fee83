#include <cuda_runtime.h>
#include <torch/csrc/stable/macros.h>

#include "axpy.h"

static __global__ void axpy_kernel(float a, const float* x, float* y, int64_t size) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < size) y[i] += a * x[i];
}

void axpy(float a, const float* x, float* y, int64_t size, void* stream) {
  if (size == 0) return;
  const unsigned blocks = static_cast<unsigned>((size + 255) / 256);
  axpy_kernel<<<blocks, 256, 0, static_cast<cudaStream_t>(stream)>>>(a, x, y, size);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}
