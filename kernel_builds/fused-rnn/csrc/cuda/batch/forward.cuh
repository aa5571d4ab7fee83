// The forward kernel of the batch engine; launch.cuh describes the engine.
#pragma once
#include <utility>

#include "cells.cuh"
#include "common/cuda/ptx/registers.cuh"

namespace flashcell::cuda::batch {

// A warpgroup that multiplies and runs the cells.
template <typename S>
struct Consumer {
  const ForwardParams& p;
  const Work& work;
  Ring<S> ring;
  Turns<S> turns;

  template <int... i>
  DEVICE void run_tile(std::integer_sequence<int, i...>, const Position<S>& at) {
    Cells<S> cells(p, work, at, ring.states());
    if (at.runs()) {
      typename S::Sums sums;
      cells.start(sums);
      multiply<S>(sums, ring, turns, at.has_product(work) ? work.panels : 0);
      cells.begin();
      (cells.template run<i>(sums), ...);
    } else {
      turns.wait(), turns.pass();
    }
    cells.finish();
  }

  DEVICE void run() {
    bool mine = !S::kTurns || turns.own == 0;
    for_positions<S>(p, work, [&](const Position<S>& at) {
      if (mine) {
        run_tile(std::make_integer_sequence<int, Cells<S>::kCount>(), at);
      } else if (at.has_product(work)) {
        ring.skip(work.panels);
      }
      mine ^= S::kTurns;
    });
  }
};

// Fetches x of the next step and a part of a row of the tile into L2.
template <typename S>
DEVICE void prefetch_x(const ForwardParams& p, const Work& work, const Position<S>& at, int row,
                       int part) {
  const Column column(p, at.row0 + row, p.x_batch);
  const int t = at.t + 1;
  if (!column.runs(t)) return;
  const auto* from = static_cast<const typename S::IO*>(p.x) + column.x_offset + t * p.x_time +
                     at.head * p.x_head + at.unit0;
#pragma unroll
  for (int g = 0; g < S::G; ++g) prefetch_units<S>(work, at, from + g * p.x_gate, part);
}

template <typename S>
__global__ void __launch_bounds__(kThreads, 1) forward_kernel(const
                                                              __grid_constant__ ForwardParams p,
                                                              const __grid_constant__ Work work) {
#if FLASHCELL_WGMMA_CODE
  extern __shared__ __align__(1024) char memory[];
  const Ring<S> ring((shared_address(memory) + 1023) / 1024 * 1024, work);
  if (threadIdx.x == 0) Ring<S>(ring).init(), mbarrier_init_fence();
  __syncthreads();
  // The shuffle tells the compiler that it is the same for a whole warp.
  const int warpgroup = __shfl_sync(~0u, int(threadIdx.x) / kWarpgroup, 0);
  if (warpgroup == 0) {
    setmaxnreg_dec<40>();
    const auto prefetch = [&](const Position<S>& at, int row, int part) {
      prefetch_x(p, work, at, row, part);
    };
    if (threadIdx.x < 32) Copies<S, decltype(prefetch)>{p, work, ring, prefetch}.run();
  } else {
    setmaxnreg_inc<232>();
    Consumer<S>{p, work, ring, {ring, warpgroup - 1}}.run();
  }
#else
  __trap();  // the planner chooses this engine only where it is compiled for 9.0a
#endif
}

}  // namespace flashcell::cuda::batch
