// Builds the table of sequences, longest first, from lengths or offsets that are on the device.
#pragma once
#include <cuda_runtime.h>

#include "common/sequence.h"

namespace flashcell::cuda {

constexpr int kTableThreads = 256;

namespace {

// The caller's lengths or offsets. The host never reads them, so they are clamped instead of
// checked: whatever the values, no sequence leaves its row and no two documents share a step.
struct Steps {
  const void* values;
  bool is_int32, is_cu_seqlens;
  int64_t S, T;

  __device__ int64_t value(int64_t i) const {
    const int64_t v =
        is_int32 ? static_cast<const int32_t*>(values)[i] : static_cast<const int64_t*>(values)[i];
    return v < 0 ? 0 : v > T ? T : v;
  }

  // Calls body(sequence, start, length) for all sequences in order; every thread of the block calls
  // it. A document is clamped to start no earlier than the one before it ends.
  template <typename Body>
  __device__ void for_each(const Body& body) const {
    __shared__ int64_t ends[kTableThreads];
    int64_t start = is_cu_seqlens ? value(0) : 0;
    for (int64_t first = 0; first < S; first += kTableThreads) {
      __syncthreads();
      const int64_t own = first + threadIdx.x;
      if (own < S) ends[threadIdx.x] = value(is_cu_seqlens ? own + 1 : own);
      __syncthreads();
      const int count = S - first < kTableThreads ? int(S - first) : kTableThreads;
      for (int i = 0; i < count; ++i) {
        const int64_t end = ends[i] < start ? start : ends[i];
        body(first + i, start, end - start);
        if (is_cu_seqlens) start = end;
      }
    }
  }
};

}  // namespace

// The position of a sequence in the table is the number of longer sequences, plus the equally long
// ones before it.
static __global__ void __launch_bounds__(kTableThreads) table_kernel(Sequence* table,
                                                                     const Steps steps,
                                                                     int64_t x_batch,
                                                                     int64_t x_time) {
  const int64_t s = blockIdx.x * int64_t(kTableThreads) + threadIdx.x;
  int64_t start = 0, length = 0, place = 0;
  if (steps.is_cu_seqlens) {
    steps.for_each([&](int64_t i, int64_t first, int64_t count) {
      if (i == s) start = first, length = count;
    });
  } else if (s < steps.S) {
    length = steps.value(s);
  }
  steps.for_each([&](int64_t i, int64_t, int64_t count) {
    place += count > length || (count == length && i < s);
  });
  if (s >= steps.S) return;
  if (steps.is_cu_seqlens) {
    table[place] = {s, start, start * x_time, length, 0};
  } else {
    table[place] = {s, s * steps.T, s * x_batch, length, steps.T - length};
  }
}

// The caller checks for launch errors, so that messages carry its kernel's name.
inline void launch_sequence_table(Sequence* table, int64_t S, int64_t T, const void* values,
                                  bool is_int32, bool is_cu_seqlens, int64_t x_batch,
                                  int64_t x_time, cudaStream_t stream) {
  if (S == 0) return;
  cudaLaunchConfig_t config{};
  config.gridDim = unsigned((S + kTableThreads - 1) / kTableThreads);
  config.blockDim = kTableThreads, config.stream = stream;
  cudaLaunchKernelEx(&config, table_kernel, table, Steps{values, is_int32, is_cu_seqlens, S, T},
                     x_batch, x_time);
}

}  // namespace flashcell::cuda
