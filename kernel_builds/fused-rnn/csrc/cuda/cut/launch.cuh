// Launches the backward pass whose recurrent gradient is cut.
#pragma once
#include "../engine.h"
#include "../launch.h"
#include "backward.cuh"

namespace flashcell::cuda {

namespace cut {

template <typename Cell, typename IO, typename V>
void run(const BackwardParams& p, const Launch& launch) {
  const int64_t unit_blocks = (p.N * p.D + kUnits - 1) / kUnits;
  const int64_t tiles = (p.S + kSequences - 1) / kSequences;
  backward_kernel<Cell, IO, V>
      <<<unsigned(unit_blocks * tiles), kUnits * kSequences, 0, launch.stream>>>(p, unit_blocks);
  check(cudaGetLastError());
}

}  // namespace cut

template <typename Cell, typename IO>
void backward_cut(const BackwardParams& p, const Launch& launch) {
  static_assert(cut::kSequences == kCutTile);
  if (p.S == 0) return;
  if constexpr (sizeof(IO) == 4) {
    if (!launch.tf32) return cut::run<Cell, IO, float>(p, launch);
  }
  cut::run<Cell, IO, typename IoTraits<IO>::Value>(p, launch);
}

}  // namespace flashcell::cuda
