// What runs before and after the engines: the table of sequences, and the sum of the bias gradient.
#include "launch.h"
#include "run.h"

namespace flashcell::cuda {

constexpr int kThreads = 256;

static unsigned blocks_for(int64_t threads) {
  return unsigned((threads + kThreads - 1) / kThreads);
}

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
static __global__ void __launch_bounds__(kThreads) table_kernel(Sequence* table, int64_t S,
                                                                const Steps steps, int64_t x_batch,
                                                                int64_t x_time) {
  __shared__ int64_t lengths[kThreads];
  const int64_t s = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  const int64_t length = s < S ? steps.length(s) : 0;
  int64_t place = 0;
  for (int64_t first = 0; first < S; first += kThreads) {
    __syncthreads();
    lengths[threadIdx.x] = first + threadIdx.x < S ? steps.length(first + threadIdx.x) : 0;
    __syncthreads();
    const int count = S - first < kThreads ? int(S - first) : kThreads;
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

void sequence_table(Sequence* table, int64_t S, int64_t T, const void* values, bool is_int32,
                    bool is_cu_seqlens, int64_t x_batch, int64_t x_time, cudaStream_t stream) {
  if (S == 0) return;
  table_kernel<<<blocks_for(S), kThreads, 0, stream>>>(
      table, S, Steps{values, is_int32, is_cu_seqlens, T}, x_batch, x_time);
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
