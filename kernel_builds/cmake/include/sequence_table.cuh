// The table of sequences, longest first, from lengths or offsets on the device.
#pragma once
#include <cuda_runtime.h>

#include "sequence.h"

namespace flashcell::cuda {

constexpr int kTableThreads = 256;

namespace {

// The caller's lengths or offsets. The host never sees them, so they are not checked but clamped:
// whatever they are, no sequence leaves its row.
struct Steps {
  const void* values;
  bool is_int32, is_cu_seqlens;
  int64_t T;

  __device__ int64_t value(int64_t i) const {
    const int64_t v =
        is_int32 ? static_cast<const int32_t*>(values)[i] : static_cast<const int64_t*>(values)[i];
    return v < 0 ? 0 : v > T ? T : v;
  }
  __device__ int64_t length(int64_t s) const {
    if (!is_cu_seqlens) return value(s);
    const int64_t length = value(s + 1) - value(s);
    return length < 0 ? 0 : length;
  }
};

}  // namespace

// A sequence's place is the number of longer ones, and of equal ones before it.
static __global__ void __launch_bounds__(kTableThreads) table_kernel(Sequence* table, int64_t S,
                                                                     const Steps steps,
                                                                     int64_t x_batch,
                                                                     int64_t x_time) {
  __shared__ int64_t lengths[kTableThreads];
  const int64_t s = blockIdx.x * int64_t(kTableThreads) + threadIdx.x;
  const int64_t length = s < S ? steps.length(s) : 0;
  int64_t place = 0;
  for (int64_t first = 0; first < S; first += kTableThreads) {
    __syncthreads();
    lengths[threadIdx.x] = first + threadIdx.x < S ? steps.length(first + threadIdx.x) : 0;
    __syncthreads();
    const int count = S - first < kTableThreads ? int(S - first) : kTableThreads;
    for (int i = 0; i < count; ++i) {
      place += lengths[i] > length || (lengths[i] == length && first + i < s);
    }
  }
  if (s >= S) return;
  if (steps.is_cu_seqlens) {
    const int64_t start = steps.value(s);
    table[place] = {s, start, start * x_time, length, 0};
  } else {
    table[place] = {s, s * steps.T, s * x_batch, length, steps.T - length};
  }
}

// A kernel checks for errors in its own name.
inline void launch_sequence_table(Sequence* table, int64_t S, int64_t T, const void* values,
                                  bool is_int32, bool is_cu_seqlens, int64_t x_batch,
                                  int64_t x_time, cudaStream_t stream) {
  if (S == 0) return;
  cudaLaunchConfig_t config{};
  config.gridDim = unsigned((S + kTableThreads - 1) / kTableThreads);
  config.blockDim = kTableThreads, config.stream = stream;
  cudaLaunchKernelEx(&config, table_kernel, table, S, Steps{values, is_int32, is_cu_seqlens, T},
                     x_batch, x_time);
}

}  // namespace flashcell::cuda
