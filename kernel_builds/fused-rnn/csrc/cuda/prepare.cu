// The kernels that run before and after the engines: the table of sequences, and the sum of the
// bias gradient.
#include "common/cuda/sequence_table.cuh"
#include "launch.h"
#include "run.h"

namespace flashcell::cuda {

constexpr int kThreads = 256;

static unsigned blocks_for(int64_t threads) {
  return unsigned((threads + kThreads - 1) / kThreads);
}

void sequence_table(Sequence* table, int64_t S, int64_t T, const void* values, bool is_int32,
                    bool is_cu_seqlens, int64_t x_batch, int64_t x_time, cudaStream_t stream) {
  launch_sequence_table(table, S, T, values, is_int32, is_cu_seqlens, x_batch, x_time, stream);
  check(cudaGetLastError());
}

static __global__ void __launch_bounds__(kThreads) bias_kernel(const float* partial, int64_t tiles,
                                                               int64_t count, float* out) {
  const int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  if (i >= count) return;
  float sum = 0;
#pragma unroll 8
  for (int64_t tile = 0; tile < tiles; ++tile) sum += partial[tile * count + i];
  out[i] = sum;
}

void reduce_bias(const float* partial, int64_t tiles, int64_t count, float* out,
                 cudaStream_t stream) {
  if (count == 0) return;
  bias_kernel<<<blocks_for(count), kThreads, 0, stream>>>(partial, tiles, count, out);
  check(cudaGetLastError());
}

}  // namespace flashcell::cuda
