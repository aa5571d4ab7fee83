// Launches the kernels for one step of one layer.
#pragma once
#include "../launch.h"
#include "backward.cuh"
#include "common/cuda/launch.cuh"
#include "forward.cuh"
#include "tiles.cuh"
#include "weights.cuh"

namespace flashcell::cuda {

// Whether a product's rows can be read as vectors of 16 bytes.
template <typename IO>
bool has_vectors(const CellProduct& product) {
  constexpr int64_t kVector = 16 / sizeof(IO);
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  const StateView& x = product.operand;
  return product.weight == nullptr ||
         (product.depth % kVector == 0 && aligned(product.weight) && aligned(x.data) &&
          (x.is_io || sizeof(IO) == 4) && x.unit == 1 && x.row % kVector == 0);
}

// Only code for sm_90 or later waits for the preceding kernel, which it may overlap.
inline bool overlaps(const Launch& launch) { return launch.device.code.arch >= 90; }

template <typename Cell, typename IO, int kWidth>
void forward_dot(const CellForward& p, const Launch& launch_of) {
  const int64_t units = kDotWarps / (p.recurrent.weight != nullptr ? 2 : 1);
  const int64_t unit_blocks = (p.D + units - 1) / units, tiles = (p.B + kWidth - 1) / kWidth;
  const Grid grid{unit_blocks * tiles, 32 * kDotWarps, 0, launch_of.stream, overlaps(launch_of)};
  if (has_vectors<IO>(p.input) && has_vectors<IO>(p.recurrent)) {
    launch(&dot_kernel<Cell, IO, kWidth, true>, grid, p, int(unit_blocks));
  } else {
    launch(&dot_kernel<Cell, IO, kWidth, false>, grid, p, int(unit_blocks));
  }
}

template <typename Cell, typename IO, int kPiece>
void forward_tiles(const CellForward& p, const Launch& launch_of) {
  using Tile = CellTile<Cell>;
  const int64_t unit_blocks = (p.D + Tile::kUnits - 1) / Tile::kUnits;
  const int64_t tiles = (p.B + Tile::kColumns - 1) / Tile::kColumns;
  const Grid grid{unit_blocks * tiles, Tile::kThreads, Tile::kBytes, launch_of.stream,
                  overlaps(launch_of)};
  launch(&tile_kernel<Cell, IO, kPiece>, grid, p, int(unit_blocks));
}

template <typename Cell, typename IO>
void forward_cell(const CellForward& p, const Launch& launch_of) {
  static_assert(Cell::kStates <= kMostStates);
  if constexpr (sizeof(IO) == 2) {
    if (p.piece == 16) return forward_tiles<Cell, IO, 16>(p, launch_of);
    if (p.piece == 8) return forward_tiles<Cell, IO, 8>(p, launch_of);
    if (p.piece == 4) return forward_tiles<Cell, IO, 4>(p, launch_of);
  }
  if (p.gates == nullptr) {
    if (p.B == 1) return forward_dot<Cell, IO, 1>(p, launch_of);
    return forward_dot<Cell, IO, 8>(p, launch_of);
  }
  const int64_t blocks = (p.D + kCellThreads - 1) / kCellThreads;
  const Grid grid{p.B * blocks, kCellThreads, 0, launch_of.stream, overlaps(launch_of)};
  launch(&cells_kernel<Cell, IO>, grid, p, int(blocks));
}

template <typename Cell, typename IO>
void backward_with_weights(const CellBackward& p, const Launch& launch_of) {
  constexpr int kUnits = SumTile<Cell>::kUnits;
  const auto tiles_of = [](int64_t width) { return (width + kSumColumns - 1) / kSumColumns; };
  const int64_t blocks = (p.D + kUnits - 1) / kUnits, tiles = tiles_of(p.weights.width);
  const Grid grid{blocks * (tiles + tiles_of(p.D)), kSumThreads, 0, launch_of.stream,
                  overlaps(launch_of)};
  launch(&weight_kernel<Cell, IO>, grid, p, int(blocks), int(tiles));
}

template <typename Cell, typename IO>
void backward_cell(const CellBackward& p, const Launch& launch_of) {
  if (p.weights.dw_ih != nullptr) return backward_with_weights<Cell, IO>(p, launch_of);
  const int64_t blocks = (p.D + kGradientUnits - 1) / kGradientUnits;
  const int64_t chunks = cell_chunks(p.B);
  const int64_t zero_blocks = (p.zero_bytes + kZeroBytes - 1) / kZeroBytes;
  Grid grid{blocks * chunks + zero_blocks, kGradientThreads, 0, launch_of.stream,
            overlaps(launch_of)};
  launch(&gradient_kernel<Cell, IO>, grid, p, int(blocks), blocks * chunks);
  if (p.db_ih == nullptr || p.B <= kCellChunk) return;
  grid.blocks = (Cell::kBias * p.D + kGradientThreads - 1) / kGradientThreads;
  launch(&bias_sums_kernel<Cell, IO>, grid, p, chunks);
}

// Instantiates both directions for a cell with every I/O type.
#define FLASHCELL_INSTANTIATE_CELL_FOR(Cell, IO)                           \
  template void forward_cell<Cell, IO>(const CellForward&, const Launch&); \
  template void backward_cell<Cell, IO>(const CellBackward&, const Launch&);
#define FLASHCELL_INSTANTIATE_CELL(Cell)     \
  FLASHCELL_INSTANTIATE_CELL_FOR(Cell, bf16) \
  FLASHCELL_INSTANTIATE_CELL_FOR(Cell, fp16) \
  FLASHCELL_INSTANTIATE_CELL_FOR(Cell, float)

}  // namespace flashcell::cuda
