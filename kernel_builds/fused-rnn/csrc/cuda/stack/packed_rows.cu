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
                                                        int64_t B, int64_t T, PackedRows rows,
                                                        Sequence* table, int64_t stride_of_x) {
  if (threadIdx.x == 0 && blockIdx.x == 0) {
    int64_t row = steps.begin;
    for (int i = 0; i < steps.count; ++i) rows.begins[steps.step + i] = row, row += steps.sizes[i];
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
    const int64_t length = (steps.step > 0 ? rows.lengths[b] : 0) + low;
    rows.lengths[b] = length, rows.firsts[b] = b * T;
    table[b] = {b, b * T, b * T * stride_of_x, length, T - length};
  }
}

}  // namespace

void write_packed_rows(const int64_t* batch_sizes, int64_t T, const PackedRows& rows,
                       Sequence* table, int64_t stride, cudaStream_t stream) {
  const int64_t B = batch_sizes[0], blocks = (B + kThreads - 1) / kThreads;
  Steps steps{};
  for (int64_t t = 0; t < T; t += kSizes) {
    steps.step = int(t), steps.count = int(T - t < kSizes ? T - t : kSizes);
    for (int i = 0; i < steps.count; ++i) steps.sizes[i] = int(batch_sizes[t + i]);
    rows_kernel<<<unsigned(blocks < 1024 ? blocks : 1024), kThreads, 0, stream>>>(steps, B, T, rows,
                                                                                  table, stride);
    check(cudaGetLastError());
    for (int i = 0; i < steps.count; ++i) steps.begin += steps.sizes[i];
  }
}

}  // namespace flashcell::cuda
