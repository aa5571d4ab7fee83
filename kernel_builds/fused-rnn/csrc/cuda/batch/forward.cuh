// The forward kernel of the batch engine; launch.cuh describes the engine.
#pragma once
#include <utility>

#include "cells.cuh"
#include "common/cuda/ptx/prefetch.cuh"
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
      multiply<S>(sums, ring, turns, at.panels(work));
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
      } else {
        ring.skip(at.panels(work));
      }
      mine ^= S::kTurns;
    });
  }
};

// The warp that fetches x of the tile's next step, or its share of the input, into L2 while the
// operand is copied.
template <typename S>
DEVICE void fetch_inputs(const ForwardParams& p, const Work& work) {
  constexpr int kUnits = 32 / S::kIo;  // of the 32 bytes that a lane fetches of every gate
  constexpr int kLanes = (S::kUnits + kUnits - 1) / kUnits;  // for a row
  for_positions<S>(p, work, [&](const Position<S>& at) {
    if (at.panels(work) == 0) return;
    named_barrier_sync_diverged<kTileThreads>(kTileBarrier);
    const int t = at.t + 1;
    if (work.input_panels > 0) {
      if (t >= at.steps) return;
      const char* input = at.input(work, t) + threadIdx.x % 32 * 32;
      for (int i = at.unit0 / S::kUnits; i < work.input_panels; i += work.unit_tiles) {
        const char* panel = input + i * at.panel_bytes(work);
        for (int j = 0; j < Ring<S>::kOperandBytes; j += 32 * 32) prefetch_l2(panel + j);
      }
      return __syncwarp();
    }
#pragma unroll 1  // the warp has too few registers for more
    for (int i = threadIdx.x % 32; i < S::kRows * kLanes; i += 32) {
      const Column column(p, at.row0 + i / kLanes, p.x_batch);
      const int unit = at.unit0 + i % kLanes * kUnits;
      if (!column.runs(t) || unit >= work.D) continue;
      const auto* from = static_cast<const typename S::IO*>(p.x) + column.x_offset + t * p.x_time +
                         at.head * p.x_head + unit;
#pragma unroll
      for (int g = 0; g < S::G; ++g) prefetch_l2(from + g * p.x_gate);
    }
    __syncwarp();
  });
}

template <typename S>
__global__ void __launch_bounds__(kThreads, 1) forward_kernel(const
                                                              __grid_constant__ ForwardParams p,
                                                              const __grid_constant__ Work work) {
#if FLASHCELL_WGMMA_CODE
  extern __shared__ __align__(1024) char memory[];
  const Ring<S> ring((shared_address(memory) + 1023) / 1024 * 1024);
  if (threadIdx.x == 0) Ring<S>(ring).init(), mbarrier_init_fence();
  __syncthreads();
  // The shuffle tells the compiler that it is the same for a whole warp.
  const int warpgroup = __shfl_sync(~0u, int(threadIdx.x) / kWarpgroup, 0);
  if (warpgroup == 0) {
    setmaxnreg_dec<40>();
    const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0);
    if (warp == kOperandWarp) copy_operand(p, work, ring);
    if (warp == kWeightWarp) copy_weights(p, work, ring);
    if (warp == kInputWarp) fetch_inputs<S>(p, work);
  } else {
    setmaxnreg_inc<232>();
    Consumer<S>{p, work, ring, {ring, warpgroup - 1}}.run();
  }
#else
  __trap();  // the planner chooses this engine only where it is compiled for 9.0a
#endif
}

}  // namespace flashcell::cuda::batch
