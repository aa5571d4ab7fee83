// The walks: every thread runs its channels from the first step to the last. Nothing is shared, so
// the time is the larger of memory's and of the chain of T steps.
#pragma once
#include "linear.cuh"
#include "track.cuh"

namespace flashcell::cuda {

template <typename Track>
__global__ void __launch_bounds__(Track::kThreads)
    walk_kernel(const __grid_constant__ ForwardParams p, int blocks_of_row) {
  extern __shared__ __align__(16) unsigned char shared[];
  const Column column(p, blockIdx.x / blocks_of_row);
  const int64_t d = int64_t(blockIdx.x % blocks_of_row * Track::kThreads + threadIdx.x) * Track::kN;
  Track track(p, column, d, reinterpret_cast<typename Track::Words*>(shared));
  if (blockIdx.x == 0 && threadIdx.x < 3) p.report[threadIdx.x] = 0;
  track.begin_sequence();
  track.prefetch(0, column.length);
  track.template walk<false, true>(0, column.length);
  track.pad(column.length, column.length + column.padding);
  track.end_sequence();
}

// A linear recurrence (linear.cuh); partial [S, P, D] takes its sums.
template <typename Element, int kThreads, int kSteps, int kGroups>
__global__ void __launch_bounds__(kThreads)
    linear_walk_kernel(const __grid_constant__ typename Element::Params p, int blocks_of_row,
                       float* partial) {
  using Word = typename Element::Word;
  using Steps = Ring<Element, kSteps, kGroups, kThreads>;
  constexpr int kN = Element::kN, kRows = Element::kRows, P = Element::kSums;
  extern __shared__ __align__(16) unsigned char shared[];
  const int64_t s = blockIdx.x / blocks_of_row;
  Element e(p, s, int64_t(blockIdx.x % blocks_of_row * kThreads + threadIdx.x) * kN);
  Steps ring(reinterpret_cast<Word*>(shared));
  float carry[kN][Element::kStates];
  e.begin(carry);
  ring.start(e, 0, e.steps);
  auto step = [&](const Word* group, int k, int i) {
    Word row[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) row[r] = group[(k * kRows + r) * kThreads];
    e.advance(Element::from_rows(row), i, e.mark(i), carry);
  };
  int i = 0;
  for (; i + kSteps <= e.steps; i += kSteps) {
    const Word* group = ring.take(e);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) step(group, k, i + k);
  }
  if (i < e.steps) {
    const Word* group = ring.take(e);
#pragma unroll 1
    for (int k = 0; i + k < e.steps; ++k) step(group, k, i + k);
  }
  e.pad(e.steps, e.steps + e.padding);
  e.end(carry);
  if constexpr (P > 0) {
#pragma unroll
    for (int c = 0; c < kN * P; ++c) {
      if (e.stored) partial[(s * P + c % P) * p.D + e.d + c / P] = e.sums[c / P][c % P];
    }
  }
}

}  // namespace flashcell::cuda
