// The cluster engine, for heads too wide for the block engine: a cluster of thread blocks runs one
// head of four or eight sequences over all of time. Each block keeps the weight of 32 units in
// registers. Forward it sends its units' h to all members after every step; backward it sends every
// member that member's share of the gradient. These are stores into shared memory of the other
// blocks, counted by an mbarrier there. There are no fences and no flags, and nothing goes through
// L2.
//
// Members wait only for each other, and the hardware starts a cluster as a whole or not at all. So
// any number of clusters may be queued, and none waits for one that never starts.
//
// A lane has every gate of its unit for one or two sequences, as in the block engine. A step of 256
// units and four sequences takes 0.41 us forward and 0.69 backward (H200, lstm). About 0.15 of it
// are the products (32 matrix instructions a warp, in chains of eight), 0.1 the cell, and the rest
// the way to the other members and back to the matrix instruction.
#pragma once
#include <algorithm>

#include "../block/launch.cuh"
#include "backward.cuh"

namespace flashcell::cuda {

template <typename Engine, typename Params>
__global__ void __launch_bounds__(Engine::kThreads) cluster_kernel(const
                                                                   __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) char memory[];
  Engine::run(p, *reinterpret_cast<typename Engine::Shared*>(memory));
#else
  __trap();  // the planner chooses this kernel only where clusters exist
#endif
}

template <typename Engine, typename Params>
void launch_cluster(const Params& p, const Launch& launch) {
  const auto kernel = cluster_kernel<Engine, Params>;
  const unsigned members = unsigned(cluster::members(p.D));
  const unsigned clusters = unsigned((p.S + launch.tile - 1) / launch.tile * p.heads);
  if (clusters == 0) return;
  // Where all blocks fit on the GPU at once, give each its own SM.
  const bool alone = clusters <= unsigned(cluster::at_once(p.D, launch.device));
  static_assert(sizeof(typename Engine::Shared) <= 99 * 1024, "the least shared memory of an arch");
  static_assert(kIsTuring || sizeof(typename Engine::Shared) == Engine::kPlannedBytes);
  const int bytes = std::max<int>(sizeof(typename Engine::Shared),
                                  alone ? launch.device.shared_bytes / 2 + 1024 : 0);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  if (members > 8) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {members, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = clusters * members, config.blockDim = Engine::kThreads;
  config.dynamicSmemBytes = size_t(bytes), config.stream = launch.stream;
  config.attrs = &attribute, config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, p));
}

template <template <typename, typename, int, int, bool> typename Engine, typename Cell, typename IO,
          typename Params>
void select_cluster(const Params& p, const Launch& launch) {
  const auto with_tile = [&]<int kDepth, int kPerLane>() {
    if (is_ragged(p)) return launch_cluster<Engine<Cell, IO, kDepth, kPerLane, true>>(p, launch);
    launch_cluster<Engine<Cell, IO, kDepth, kPerLane, false>>(p, launch);
  };
  const auto with_depth = [&]<int kDepth>() {
    if (launch.tile == 4) return with_tile.template operator()<kDepth, 1>();
    with_tile.template operator()<kDepth, 2>();
  };
  if (p.D <= 256) return with_depth.template operator()<256>();
  with_depth.template operator()<512>();
}

template <typename Cell, typename IO>
void forward_cluster(const ForwardParams& p, const Launch& launch) {
  select_cluster<ClusterForward, Cell, IO>(p, launch);
}

template <typename Cell, typename IO>
void backward_cluster(const BackwardParams& p, const Launch& launch) {
  select_cluster<ClusterBackward, Cell, IO>(p, launch);
}

}  // namespace flashcell::cuda
