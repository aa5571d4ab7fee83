// The fma engine: one thread block runs one head of one or more sequences over all of time, in
// exact fp32. The head's weight stays in registers and is multiplied by plain multiply-adds. No
// block ever waits for another.
//
// Between two steps the operand (h forward, dr backward) passes through shared memory and one
// barrier. A few neighbouring lanes compute the products of a unit, each with a part of the depth,
// and add them up by shuffles that leave every lane with the complete sums of the cells it then
// computes.
#pragma once
#include "../engine.h"
#include "../launch.h"
#include "backward.cuh"
#include "cluster_backward.cuh"
#include "common/cuda/launch.cuh"
#include "forward.cuh"

namespace flashcell::cuda {

template <typename Pass, typename Params>
__global__ void __launch_bounds__(Pass::kThreads, Pass::kResident) fma_kernel(
    const __grid_constant__ Params p, const __grid_constant__ fma::Memory m) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  constexpr bool kRuns = !Pass::kCluster && !Pass::kTwo;
  if constexpr (!kRuns) __trap();  // the planner chooses these kernels where clusters exist
#else
  constexpr bool kRuns = true;
#endif
  extern __shared__ __align__(16) char memory[];
  if constexpr (kRuns) Pass::run(p, m, reinterpret_cast<float*>(memory));
}

template <typename Pass, typename Params>
void launch_fma(const Params& p, const fma::Memory& m, int threads, const Launch& launch) {
  const int64_t blocks = p.heads * fma::divide_up(p.S, m.tile) * m.members;
  const Grid grid{blocks, threads, int(m.bytes()), launch.stream, false, m.members};
  cuda::launch(&fma_kernel<Pass, Params>, grid, p, m);
}

// Calls a function with the width and the number of sequences that a kernel is compiled for.
template <int kGates, typename Function>
void with_fma_sizes(int64_t D, int tile, Function function) {
  const auto with_width = [&]<int kWidth>() {
    if (tile == 1) return function.template operator()<kWidth, 1>();
    if constexpr (fma::takes_two(kGates, kWidth)) {
      if (tile == 2) return function.template operator()<kWidth, 2>();
    }
    function.template operator()<kWidth, 4>();
  };
  switch (fma::compiled_width(D)) {
    case 32:
      return with_width.template operator()<32>();
    case 64:
      return with_width.template operator()<64>();
    case 96:
      return with_width.template operator()<96>();
    case 128:
      return with_width.template operator()<128>();
    default:
      return with_width.template operator()<256>();
  }
}

template <typename Cell, typename IO>
void forward_fma(const ForwardParams& p, const Launch& launch) {
  const fma::Memory m = fma::forward_memory(kSizesOf<Cell>, p.D, launch.tile);
  with_fma_sizes<Cell::kGates>(p.D, launch.tile, [&]<int kWidth, int kSequences>() {
    using Pass = FmaForward<Cell, kWidth, kSequences>;
    launch_fma<Pass>(p, m, Pass::kDivision.threads(m.units), launch);
  });
}

template <typename Cell, typename IO>
void backward_fma(const BackwardParams& p, const Launch& launch) {
  const fma::Memory m = fma::backward_memory(kSizesOf<Cell>, p.D, launch.tile);
  with_fma_sizes<Cell::kGates>(p.D, launch.tile, [&]<int kWidth, int kSequences>() {
    if constexpr (fma::uses_cluster(Cell::kGates, kWidth)) {
      using Pass = FmaClusterBackward<Cell, kWidth, kSequences>;
      launch_fma<Pass>(p, m, Pass::kThreads, launch);
    } else {
      using Pass = FmaBackward<Cell, kWidth, kSequences>;
      launch_fma<Pass>(p, m, Pass::kDivision.threads(p.D), launch);
    }
  });
}

}  // namespace flashcell::cuda
