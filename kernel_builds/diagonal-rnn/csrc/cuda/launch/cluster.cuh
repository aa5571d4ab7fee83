// Launches a scan by clusters: how many blocks share a sequence, and the launch itself.
#pragma once
#include <algorithm>

#include "../scan/cluster.cuh"
#include "linear.cuh"

namespace flashcell::cuda {

// Tiles of kWarps * kSteps steps, kSlots of them in a block's shared memory.
template <typename Element, int kWarps, int kSteps, int kSlots, int kLag>
struct Clusters {
  using Params = typename Element::Params;
  using Tile = ClusterTile<Element, kWarps, kSteps, kSlots, kLag>;
  static constexpr int kSharedBytes = int(sizeof(typename Tile::Shared));
  static_assert(kSharedBytes <= 227 << 10, "what a block may have on sm_90 and sm_100");

  static int64_t scratch(int64_t, int64_t, int64_t, Way) { return 0; }

  static void run(const Params& p, int64_t S, Way, const Launch& to, float*) {
    const int64_t groups_of_row = ceil_div(p.D, Tile::kChannels), columns = S * groups_of_row;
    const int64_t tiles = ceil_div(p.T, Tile::kLength);
    const bool sparse =
        !Element::kIsForward && sizeof(typename Element::IO) == 4 && S * p.T * p.D >= kSparseSteps;
    // Pairs of fp32 channels are used for very many steps, which are faster with fewer blocks
    // (1x65536x1024 takes 201 us with 5 blocks per cluster, 229 with 6).
    const int64_t most = sizeof(typename Tile::Word) == 8
                             ? std::clamp<int64_t>(to.device.sms * 5 / 8 / columns, 1, 8)
                             : cluster_blocks(columns, sparse, to.device);
    const int blocks = int(std::clamp<int64_t>(tiles, 1, most));
    auto kernel = cluster_scan_kernel<Tile>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    cudaLaunchAttribute attributes[2]{};  // a single block is launched as a cluster of one
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {unsigned(blocks), 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = unsigned(columns * blocks), config.blockDim = Tile::kThreads;
    config.dynamicSmemBytes = kSharedBytes, config.stream = to.stream;
    config.attrs = attributes, config.numAttrs = 2;
    const int rounds = int(ceil_div(p.T, int64_t(Tile::kLength) * blocks));
    check(cudaLaunchKernelEx(&config, kernel, p, rounds, int(groups_of_row)));
  }
};

}  // namespace flashcell::cuda
