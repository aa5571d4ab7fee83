// One thread block, one head, eight sequences, all of time: the head's weight stays in registers,
// so a step moves nothing but its own x and h. No two blocks ever wait for each other.
//
// Lane 4 r + q of a warp has every gate of its units for columns 2 q and 2 q + 1 (of tiles of four
// sequences, for 2 q only: the odd columns are empty), so what the cell needs meets in one lane and
// states never leave registers. Between two steps the operand (h forward, dr backward) crosses
// shared memory and one barrier; whatever is not on the way from one operand to the next happens in
// the shadow of the next step's products.
//
// What a step costs at least, lstm of width 64: the way through shared memory (80 clocks), 64
// matrix instructions on 4 tensor cores of 6.5 clocks each (104) and 5 x 512 non-linearities, 16 a
// clock (160, half of it in the shadow of the rest): about 0.15 us at 1.9 GHz.
#pragma once
#include "../engine.h"
#include "../launch.h"
#include "backward.cuh"
#include "forward.cuh"

namespace flashcell::cuda {

// The widest head: registers hold 4 gates x 128 x 128 in 16 bits, 4 x 64 x 64 in 32.
template <typename IO>
constexpr int kBlockWidth = tiles::kBlockRowBytes / sizeof(IO);

template <typename Engine, typename Params>
__global__ void __launch_bounds__(Engine::kThreads) block_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) char memory[];
  Engine::run(p, *reinterpret_cast<typename Engine::Shared*>(memory));
}

template <typename Engine, typename Params>
void launch_block(const Params& p, const Launch& launch) {
  constexpr int bytes = sizeof(typename Engine::Shared);
  static_assert(bytes <= 99 * 1024, "the least an arch we build for has");
  static_assert(bytes == Engine::kPlannedBytes);
  const auto kernel = block_kernel<Engine, Params>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const int64_t tiles = (p.S + launch.tile - 1) / launch.tile;
  kernel<<<unsigned(tiles * p.N), Engine::kThreads, bytes, launch.stream>>>(p);
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
