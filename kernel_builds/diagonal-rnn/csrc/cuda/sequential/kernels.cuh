// The sequential kernels: every thread runs its channels from the first step to the last. Threads
// share nothing, so the time is the larger of memory's and of the chain of T dependent steps.
#pragma once
#include "../plan.h"
#include "linear_track.cuh"
#include "track.cuh"

namespace flashcell::cuda {

// Returns the first channel of a thread. A thread past the last channel repeats the work of some
// other thread, bit for bit. They do not all repeat the last channel: with three warps of a block
// reading one address, the backward pass of 8x2048x4160 took 1.0 ms, that of 8x2048x4096 0.55.
template <typename Track>
DEVICE int64_t channel_of_thread(int64_t D, int blocks_of_row) {
  const int64_t block = blockIdx.x % blocks_of_row;
  const int64_t d = (block * blockDim.x + threadIdx.x) * Track::kN;
  return d < D ? d : d % D;
}

template <typename Track>
__global__ void __launch_bounds__(kWalkThreads) walk_kernel(const __grid_constant__ ForwardParams p,
                                                            int blocks_of_row) {
  extern __shared__ __align__(16) unsigned char shared[];
  const Column column(p, blockIdx.x / blocks_of_row);
  Track track(p, column, channel_of_thread<Track>(p.D, blocks_of_row), shared);
  if (blockIdx.x == 0 && threadIdx.x < 3) p.report[threadIdx.x] = 0;
  track.begin_sequence();
  track.prefetch(0, column.length);
  track.template walk<false, true>(0, column.length);
  track.pad(column.length, column.length + column.padding);
  track.end_sequence();
}

// Runs a linear recurrence (linear.cuh); its sums over the steps go to partial [S, P, D].
template <typename Track, int kMostThreads>
__global__ void __launch_bounds__(kMostThreads) linear_walk_kernel(const __grid_constant__
                                                                   typename Track::Params p,
                                                                   int blocks_of_row,
                                                                   float* partial) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int64_t s = blockIdx.x / blocks_of_row;
  Track track(p, s, channel_of_thread<Track>(p.D, blocks_of_row), shared);
  track.e.begin(track.carry);
  track.prefetch(0, track.e.steps);
  track.walk(0, track.e.steps);
  track.e.pad(track.e.steps, track.e.steps + track.e.padding);
  track.e.end(track.carry);
  track.keep_sums(partial, s);
}

}  // namespace flashcell::cuda
