// Where the rows of a PackedSequence lie, from its batch sizes, which are on the host.
#include "../launch.h"
#include "../run.h"

namespace flashcell::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kSizes = 960;

// Some of a PackedSequence's steps: those from `step` on.
struct Steps {
  int step, count;
  int64_t begin;      // row of the first step
  int sizes[kSizes];  // sequences at each step, which never increase
};

__global__ void __launch_bounds__(kThreads) rows_kernel(const __grid_constant__ Steps steps,
                                                        int64_t B, int64_t T, int64_t* begins,
                                                        int64_t* firsts, int64_t* lengths) {
  if (threadIdx.x == 0 && blockIdx.x == 0) {
    int64_t row = steps.begin;
    for (int i = 0; i < steps.count; ++i) begins[steps.step + i] = row, row += steps.sizes[i];
  }
  const int64_t stride = int64_t(gridDim.x) * kThreads;
  for (int64_t b = int64_t(blockIdx.x) * kThreads + threadIdx.x; b < B; b += stride) {
    int low = 0, high = steps.count;  // the steps that have more than b sequences end in between
    while (low < high) {
      const int middle = (low + high) / 2;
      if (steps.sizes[middle] > b) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    lengths[b] = (steps.step > 0 ? lengths[b] : 0) + low;
    firsts[b] = b * T;
  }
}

__global__ void __launch_bounds__(kThreads) table_kernel(Sequence* table, const int64_t* lengths,
                                                         int64_t B, int64_t T, int64_t stride) {
  const int64_t b = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (b < B) table[b] = {b, b * T, b * T * stride, lengths[b], T - lengths[b]};
}

}  // namespace

void write_packed_rows(const int64_t* batch_sizes, int64_t T, int64_t* begins, int64_t* firsts,
                       int64_t* lengths, cudaStream_t stream) {
  const int64_t B = batch_sizes[0], blocks = (B + kThreads - 1) / kThreads;
  Steps steps{};
  for (int64_t t = 0; t < T; t += kSizes) {
    steps.step = int(t), steps.count = int(T - t < kSizes ? T - t : kSizes);
    for (int i = 0; i < steps.count; ++i) steps.sizes[i] = int(batch_sizes[t + i]);
    rows_kernel<<<unsigned(blocks < 1024 ? blocks : 1024), kThreads, 0, stream>>>(
        steps, B, T, begins, firsts, lengths);
    check(cudaGetLastError());
    for (int i = 0; i < steps.count; ++i) steps.begin += steps.sizes[i];
  }
}

void write_packed_table(Sequence* table, const int64_t* lengths, int64_t B, int64_t T,
                        int64_t stride, cudaStream_t stream) {
  const int64_t blocks = (B + kThreads - 1) / kThreads;
  table_kernel<<<unsigned(blocks), kThreads, 0, stream>>>(table, lengths, B, T, stride);
  check(cudaGetLastError());
}

}  // namespace flashcell::cuda
