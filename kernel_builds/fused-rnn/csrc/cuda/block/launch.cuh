// The block engine: one thread block runs one head of eight (or four) sequences over all of time.
// The head's weight stays in registers, so a step moves nothing but its own x and h. No block ever
// waits for another.
//
// Lane 4 r + q of a warp has every gate of its units for columns 2 q and 2 q + 1 (in tiles of four
// sequences only for 2 q, as odd columns are empty). So a lane has all values that its cells need,
// and states never leave registers. Between two steps the operand (h forward, dr backward) passes
// through shared memory and one barrier. All other work overlaps with the next step's matrix
// instructions.
//
// The least time of a step, for an lstm of width 64: the way through shared memory (80 clocks), 64
// matrix instructions on 4 tensor cores at 6.5 clocks each (104), and 5 x 512 non-linearities at 16
// a clock (160, half of it overlapped): about 0.15 us at 1.9 GHz.
#pragma once
#include "../engine.h"
#include "../launch.h"
#include "backward.cuh"
#include "forward.cuh"

namespace flashcell::cuda {

// The widest head: registers hold 4 x 128 x 128 weights of 16 bits or 4 x 64 x 64 of 32 bits.
template <typename IO>
constexpr int kBlockWidth = tiles::kBlockRowBytes / sizeof(IO);

// Whether the planner offers these sizes to code for Turing.
template <typename Engine>
constexpr bool kFitsTuring = Engine::kWeightRowBytes <= block::kTuringRowBytes;

template <typename Engine, typename Params>
__global__ void __launch_bounds__(Engine::kThreads) block_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) char memory[];
  using Shared = typename Engine::Shared;
  if constexpr (kIsTuring && (sizeof(typename Engine::IO) == 4 || !kFitsTuring<Engine>)) {
    __trap();  // the planner chooses the kernels of tf32 and of wide heads for other code
  } else {
    Engine::run(p, *reinterpret_cast<Shared*>(memory));
  }
}

template <typename Engine, typename Params>
void launch_block(const Params& p, const Launch& launch) {
  static_assert(sizeof(typename Engine::Shared) == Engine::planned_bytes(kIsTuring));
  static_assert(Engine::planned_bytes(false) <= 99 * 1024, "the least an arch from 8.0 on has");
  static_assert(!kFitsTuring<Engine> || Engine::planned_bytes(true) <= kTuringSharedBytes);
  const int bytes = int(Engine::planned_bytes(launch.device.code.is_turing()));
  const auto kernel = block_kernel<Engine, Params>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const int64_t tiles = (p.S + launch.tile - 1) / launch.tile;
  kernel<<<unsigned(tiles * p.heads), Engine::kThreads, bytes, launch.stream>>>(p);
  check(cudaGetLastError());
}

inline bool is_ragged(const SequenceParams& p) {
  return p.sequences != nullptr || p.reset != nullptr || p.hold != nullptr;
}

template <template <typename, typename, int, int, bool> typename Engine, typename Cell, typename IO,
          typename Params>
void select_block(const Params& p, const Launch& launch) {
  const auto with_tile = [&]<int kWidth, int kPerLane>() {
    if (is_ragged(p)) return launch_block<Engine<Cell, IO, kWidth, kPerLane, true>>(p, launch);
    launch_block<Engine<Cell, IO, kWidth, kPerLane, false>>(p, launch);
  };
  const auto with_width = [&]<int kWidth>() {
    if (launch.tile == 4) return with_tile.template operator()<kWidth, 1>();
    with_tile.template operator()<kWidth, 2>();
  };
  if (p.D <= 32) return with_width.template operator()<32>();
  if (p.D <= 64) return with_width.template operator()<64>();
  if constexpr (kBlockWidth<IO> > 64) with_width.template operator()<128>();
}

template <typename Cell, typename IO>
void forward_block(const ForwardParams& p, const Launch& launch) {
  select_block<BlockForward, Cell, IO>(p, launch);
}

template <typename Cell, typename IO>
void backward_block(const BackwardParams& p, const Launch& launch) {
  select_block<BlockBackward, Cell, IO>(p, launch);
}

}  // namespace flashcell::cuda
