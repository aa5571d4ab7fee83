// The grid engine, for heads wider than one thread block. ceil(D / 16) thread blocks form a group,
// which runs one head for several tiles of eight sequences. Each block keeps the weight of 16 units
// on chip for the whole call and, after every step, passes its part of h (backward: of dr) to the
// others through L2 (exchange.cuh). Eight warps of a block multiply (product.cuh), and four or
// eight run the cell (cell.cuh). If blocks of 24 units allow more groups, six warps run the cell
// and two load its inputs (inputs.cuh).
//
// The least time of a step (H200, 16 sequences of an LSTM of 1024 units, bf16): 0.25 to 0.35 us
// from a store to the poll that sees it; as much again for polls that come too early and for L2
// bandwidth (16 KB per tile and block); 0.15 us for matrix instructions; 0.15 us for the partial
// sums; 0.1 us for the cell. The exchange of one tile overlaps with the group's work on its other
// tiles.
#pragma once
#include <algorithm>
#include <utility>

#include "../launch.h"
#include "cell.cuh"
#include "common/cuda/ptx/registers.cuh"
#include "inputs.cuh"
#include "product.cuh"

namespace flashcell::cuda {
namespace grid {

// Moves registers from the cell warps to the product warps, whose weights need them.
template <int kRegisters>
DEVICE void take_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
DEVICE void leave_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

template <typename Pass, int kBlocks, bool kMarked>
constexpr int kHalves = cell_halves(Pass::kShape, kBlocks, kMarked);
template <typename Pass>
constexpr int kFetchThreads = fetch_threads(Pass::kShape);
template <typename Pass, int kBlocks, bool kMarked>
constexpr int kThreads =
    kProducts + kHalves<Pass, kBlocks, kMarked> * cell_threads(Pass::kShape) + kFetchThreads<Pass>;

template <typename Pass, int kBlocks, bool kMarked, typename Params = typename Pass::Params>
__global__ void __launch_bounds__(kThreads<Pass, kBlocks, kMarked>, 1) grid_kernel(
    const __grid_constant__ Params p, const __grid_constant__ Range range) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  __trap();  // the planner chooses this kernel only where barriers in shared memory exist
#else
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (Pass::kWide > 1 || Pass::kShape.units > kUnits) {
    __trap();  // the planner chooses wide tiles and tall blocks only where they are compiled
    return;
  }
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if constexpr (Pass::kSplit > 1) {
    __trap();  // the planner lets thread blocks share products only where clusters exist
    return;
  }
#endif
  extern __shared__ __align__(16) unsigned char memory[];
  constexpr int kCellHalves = kHalves<Pass, kBlocks, kMarked>;
  constexpr int kFetch = kFetchThreads<Pass>;
  // Such kernels have eight cell warps.
  constexpr bool kRoomy = Pass::kWide > 1 || Pass::kShape.units > kUnits;
  const Block<Pass> block(p, range, memory);
  if (threadIdx.x < 2) mbarrier_init(block.shared.emptied[threadIdx.x], Shared<Pass>::kCellWarps);
  if (kFetch > 0 && threadIdx.x < kStages) {
    mbarrier_init(block.shared.fetched[threadIdx.x], kFetch);
    mbarrier_init(block.shared.released[threadIdx.x], Shared<Pass>::kCellWarps);
  }
  if (threadIdx.x < 4) mbarrier_init(block.shared.received[threadIdx.x / 2][threadIdx.x % 2], 1);
  if constexpr (Pass::kSplit > 1) cluster_sync();
  if (threadIdx.x < kProducts) {
    // Move registers from the cell warps to the product warps, whose weights need them.
    setmaxnreg_inc<kRoomy ? 184 : kCellHalves == 2 ? 160 : 208>();
    Product<Pass, kBlocks, kMarked>(block).run();
  } else {
    setmaxnreg_dec<kRoomy ? 72 : kCellHalves == 2 ? 96 : 88>();
    if (kFetch == 0 || threadIdx.x < kThreads<Pass, kBlocks, kMarked> - kFetch) {
      Cells<Pass, kCellHalves, kMarked>(block).run();
    } else if constexpr (kFetch > 0) {
      Fetch<Pass>(block).run();
    }
  }
  // No block may exit while others still send to its shared memory.
  if constexpr (Pass::kSplit > 1) cluster_sync();
#endif
}

template <typename Pass>
struct Kernel {
  void (*function)(typename Pass::Params, Range);
  int threads;
};

// Returns the kernel compiled for a number of blocks of the depth.
template <typename Pass, bool kMarked, int kBlocks = least_blocks(Pass::kShape, kMarked)>
Kernel<Pass> kernel_for(int blocks) {
  constexpr int kMost = max_blocks(Pass::kShape);
  constexpr int kNext = kBlocks < 4 ? kBlocks + 1 : kBlocks < 8 ? 8 : kMost;
  static_assert(kMost > 8 || kMost <= 4);
  if constexpr (kBlocks < kMost) {
    if (blocks > kBlocks || (is_exact(kBlocks, kMarked) && blocks < kBlocks)) {
      return kernel_for<Pass, kMarked, kNext>(blocks);
    }
  }
  return {grid_kernel<Pass, kBlocks, kMarked>, kThreads<Pass, kBlocks, kMarked>};
}

// Runs the pass if this kernel can, else returns false.
template <typename Pass>
bool run(const typename Pass::Params& p, const Launch& launch) {
  using IO = typename Pass::IO;
  static_assert(sizeof(Column) == kColumnBytes);
  static_assert(sizeof(Shared<Pass>) <= shared_bytes(Pass::kShape, 0));
  const int64_t tiles = tiles_of(Pass::kShape, p.S);
  const int64_t members = thread_blocks(Pass::kShape, p.D);
  if (tiles * members * p.heads == 0) return true;
  const bool marked = p.reset != nullptr || p.hold != nullptr;
  if (!can_run(Pass::kShape, marked, p.S, p.heads, p.D, launch.device)) return false;

  const int sms = launch.device.sms;
  const int bytes = int(shared_bytes(Pass::kShape, p.D));
  const int blocks = int(blocks_of_depth(Pass::kShape, p.D));
  auto kernel = kernel_for<Pass, false>(blocks);
  if constexpr (Pass::kWide == 1) {
    if (marked) kernel = kernel_for<Pass, true>(blocks);
  }
  check(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeCooperative, attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {unsigned(Pass::kSplit), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = unsigned(members), config.blockDim = unsigned(kernel.threads);
  config.dynamicSmemBytes = size_t(bytes), config.stream = launch.stream;
  config.attrs = attributes, config.numAttrs = Pass::kSplit > 1 ? 2 : 1;
  int together = 0;  // thread blocks that run at once
  if (Pass::kSplit > 1) {
    check(cudaOccupancyMaxActiveClusters(&together, kernel.function, &config));
    together *= Pass::kSplit;
  } else {
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&together, kernel.function, kernel.threads,
                                                        bytes));
    together = together > 0 ? sms : 0;
  }
  if (!has_room(Pass::kShape, p.S, p.heads, p.D, together, launch.device)) return false;

  if (Pass::kDescends || p.T > 1) {  // in a single forward step nothing polls h
    fill_exchanged<IO>(p, Pass::medium(p), Pass::kGates, launch);
  }
  int64_t initial = 0;
  if constexpr (!Pass::kDescends) {
    if (p.initial != nullptr) {
      initial = (reinterpret_cast<intptr_t>(launch.scratch) -
                 reinterpret_cast<intptr_t>(Pass::medium(p))) /
                int64_t(sizeof(IO));
      round_states<IO>(static_cast<const float*>(p.initial), launch.scratch, p.S * p.N * p.D,
                       launch.stream);
    }
  }
  const int64_t heads = heads_at_once(Pass::kShape, p.heads, p.D, together);
  const int64_t end = p.first_head + p.heads;
  for (int64_t head = p.first_head; head < end; head += heads) {
    const int64_t count = std::min(heads, end - head);
    const int64_t groups = groups_of(Pass::kShape, p.S, count, p.D, together);
    const int64_t polled =
        count * groups * members * p.D * int64_t(sizeof(IO)) * std::min<int64_t>(8, p.S);
    const Range range{int(head),
                      int(groups),
                      int(members),
                      blocks,
                      unsigned(p.N * p.D),
                      initial,
                      Pass::kDescends ? 0 : pause_clocks(polled)};
    config.gridDim = unsigned(count * groups * members);
    check(cudaLaunchKernelEx(&config, kernel.function, p, range));
  }
  return true;
}

inline void refuse(int64_t D) {
  throw std::runtime_error("fused_rnn: the grid engine cannot run heads of width " +
                           std::to_string(D) + " on this GPU");
}

template <typename Cell, typename IO, Variant kVariant>
using ForwardOf = ForwardPass<Cell, IO, kVariant.wide, kVariant.units>;
template <typename Cell, typename IO, Variant kVariant>
using BackwardOf = BackwardPass<Cell, IO, kVariant.split, kVariant.wide, kVariant.units>;

}  // namespace grid

template <typename Cell, typename IO>
void forward_grid(const ForwardParams& p, const Launch& launch) {
  using namespace grid;
  static constexpr Variants kAll = forward_variants(Cell::kGates, sizeof(IO));
  const bool runs = [&]<size_t... i>(std::index_sequence<i...>) {
    return (run<ForwardOf<Cell, IO, kAll.list[i]>>(p, launch) || ...);
  }(std::make_index_sequence<kAll.count>());
  if (!runs) refuse(p.D);
}

template <typename Cell, typename IO>
void backward_grid(const BackwardParams& p, const Launch& launch) {
  using namespace grid;
  static constexpr Variants kAll = backward_variants(Cell::kGates, sizeof(IO));
  const bool runs = [&]<size_t... i>(std::index_sequence<i...>) {
    return (run<BackwardOf<Cell, IO, kAll.list[i]>>(p, launch) || ...);
  }(std::make_index_sequence<kAll.count>());
  if (!runs) refuse(p.D);
}

}  // namespace flashcell::cuda
