// The kernels that run before and after the engines: the table of sequences, and the sum of the
// bias gradient.
#include "common/cuda/sequence_table.cuh"
#include "launch.h"
#include "run.h"

namespace flashcell::cuda {

constexpr int kThreads = 256;

void sequence_table(Sequence* table, int64_t S, int64_t T, const void* values, bool is_int32,
                    bool is_cu_seqlens, int64_t x_batch, int64_t x_time, cudaStream_t stream) {
  launch_sequence_table(table, S, T, values, is_int32, is_cu_seqlens, x_batch, x_time, stream);
  check(cudaGetLastError());
}

// Each warp adds up every kWarps-th tile of 32 elements.
static constexpr int kWarps = kThreads / 32;
static __global__ void __launch_bounds__(kThreads) bias_kernel(const float* partial, int64_t tiles,
                                                               int64_t count, float* out) {
  __shared__ float sums[kWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t i = blockIdx.x * int64_t(32) + lane;
  float sum = 0;
#pragma unroll 4
  for (int64_t tile = warp; tile < tiles && i < count; tile += kWarps) {
    sum += partial[tile * count + i];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || i >= count) return;
  for (int w = 1; w < kWarps; ++w) sum += sums[w][lane];
  out[i] = sum;
}

void reduce_bias(const float* partial, int64_t tiles, int64_t count, float* out,
                 cudaStream_t stream) {
  if (count == 0) return;
  bias_kernel<<<unsigned((count + 31) / 32), kThreads, 0, stream>>>(partial, tiles, count, out);
  check(cudaGetLastError());
}

}  // namespace flashcell::cuda
