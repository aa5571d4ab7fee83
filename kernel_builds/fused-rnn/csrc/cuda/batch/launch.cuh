// The batch engine, for large batches on Hopper: one persistent kernel for the whole pass, or one
// after another for parts of the heads if the weights of all do not stay in L2. A thread block owns
// tiles of sequences by units. At every step two warps copy h of the tile's sequences and the
// units' weights from L2 into a ring of stages in shared memory (product.cuh). wgmma multiplies
// them, and the same threads run the cells on the sums (cells.cuh), write h for the next step, and
// count up. The blocks of the same sequences wait for that count, and for nothing else. Of fp32 the
// operands are rounded to TF32, and nothing else is.
//
// x may be the product of a layer's input, which the engine computes too: before the panels of h
// the two warps copy those of the input, which wait for no other block, and the sums begin without
// x.
//
// What a step needs at least, of an LSTM of 1024 units and sequences: 9.3 us for the products of a
// tile of 256 sequences by 32 units, and 1.5 us for the 5 tanh of its cells. The loads from L2, 100
// MB, run beside the products. In tiles that take turns, the cells and the exchange of one tile run
// beside the products of the next.
#pragma once
#include <utility>

#include "../launch.h"
#include "forward.cuh"
#include "prepare.cuh"

namespace flashcell::cuda {

namespace batch {

template <typename Cell, typename IO, int kTile>
void run_forward(const ForwardParams& p, const Sizes& sizes, const Launch& launch) {
  constexpr Tile kThis = tiles(Cell::kGates, sizeof(IO))[kTile];
  Work work(p, Cell::kGates, Cell::kBias, sizeof(IO), kThis, launch.scratch);
  work.has_initial = p.initial != nullptr;
  const bool is_dense = p.h_units == 0;
  work.h_units = int(is_dense ? p.D : p.h_units);
  work.h_time = is_dense ? p.N * p.D : p.h_time;
  work.h_batch = is_dense ? p.T * p.N * p.D : p.h_batch;
  prepare_kernel<Cell, IO><<<unsigned(8 * launch.device.sms), kPrepareThreads, 0, launch.stream>>>(
      p, work, kThis.units);
  check(cudaGetLastError());

  using Plain = Shape<Cell, IO, kTile, false>;
  auto kernel = forward_kernel<Plain>;
  if constexpr (kTile < tiles(Cell::kGates, sizeof(IO)).count_with(saves_wide(sizeof(IO)))) {
    if (p.saved != nullptr) kernel = forward_kernel<Shape<Cell, IO, kTile, true>>;
  }
  const int bytes = kThis.shared_bytes(Cell::kGates, Plain::kKeeps);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  int of_sm = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_sm, kernel, kThreads, size_t(bytes)));
  if (of_sm == 0) throw std::runtime_error("fused_rnn: the batch engine does not fit on this GPU");
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative, attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.blockDim = unsigned(kThreads);
  config.dynamicSmemBytes = size_t(bytes), config.stream = launch.stream;
  config.attrs = &attribute, config.numAttrs = 1;
  ForwardParams part = p;
  part.heads = sizes.heads_of_launch();
  for (part.first_head = 0; part.first_head < p.N; part.first_head += part.heads) {
    part.heads = std::min(part.heads, p.N - part.first_head);
    const int64_t tiles = part.heads * work.row_tiles * work.unit_tiles;
    config.gridDim = unsigned(count_blocks(tiles, launch.device));
    check(cudaLaunchKernelEx(&config, kernel, part, work));
  }
}

}  // namespace batch

template <typename Cell, typename IO>
void forward_batch(const ForwardParams& p, const Launch& launch) {
  if (p.S == 0) return;
  constexpr bool kKeeps = batch::keeps_state(kSizesOf<Cell>);
  const batch::Sizes sizes{p.S,      p.N, p.D, Cell::kGates, sizeof(IO), kKeeps, p.saved != nullptr,
                           p.input.I};
  const int best = batch::best_tile(sizes, launch.device);
  [&]<int... i>(std::integer_sequence<int, i...>) {
    ((i == best ? batch::run_forward<Cell, IO, i>(p, sizes, launch) : void()), ...);
  }(std::make_integer_sequence<int, batch::tiles(Cell::kGates, sizeof(IO)).count_with(kKeeps)>());
}

}  // namespace flashcell::cuda
