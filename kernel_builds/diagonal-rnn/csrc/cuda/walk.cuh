// The walks: every thread runs its channels from the first step to the last. Nothing is shared, so
// the time is the larger of memory's and of the chain of T steps.
#pragma once
#include "linear_track.cuh"
#include "track.cuh"

namespace flashcell::cuda {

template <typename Track>
__global__ void __launch_bounds__(Track::kThreads) walk_kernel(const
                                                               __grid_constant__ ForwardParams p,
                                                               int blocks_of_row) {
  extern __shared__ __align__(16) unsigned char shared[];
  const Column column(p, blockIdx.x / blocks_of_row);
  const int64_t d = int64_t(blockIdx.x % blocks_of_row * Track::kThreads + threadIdx.x) * Track::kN;
  Track track(p, column, d, shared);
  if (blockIdx.x == 0 && threadIdx.x < 3) p.report[threadIdx.x] = 0;
  track.begin_sequence();
  track.prefetch(0, column.length);
  track.template walk<false, true>(0, column.length);
  track.pad(column.length, column.length + column.padding);
  track.end_sequence();
}

// A linear recurrence (linear.cuh); partial [S, P, D] takes its sums.
template <typename Track>
__global__ void __launch_bounds__(Track::kThreads) linear_walk_kernel(const __grid_constant__
                                                                      typename Track::Params p,
                                                                      int blocks_of_row,
                                                                      float* partial) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int64_t s = blockIdx.x / blocks_of_row;
  const int64_t d = int64_t(blockIdx.x % blocks_of_row * Track::kThreads + threadIdx.x) * Track::kN;
  Track track(p, s, d, shared);
  track.e.begin(track.carry);
  track.prefetch(0, track.e.steps);
  track.walk(0, track.e.steps);
  track.e.pad(track.e.steps, track.e.steps + track.e.padding);
  track.e.end(track.carry);
  track.keep_sums(partial, s);
}

}  // namespace flashcell::cuda
