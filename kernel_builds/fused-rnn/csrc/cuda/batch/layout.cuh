// Where a unit's weights, operands and sums lie.
#pragma once
#include "../sequence.cuh"
#include "common/cuda/ptx/shared_operand.cuh"
#include "plan.h"

namespace flashcell::cuda::batch {

// The columns of a tile are ordered so that a thread finds all gates of four neighbouring units in
// its sums: column 8 j + 2 q + e, which lane 4 r + q has, is unit 16 p + 4 q + 2 k + e of the tile
// and gate g, where j = 2 (G p + g) + k. Of a last group of 8 units, column 8 j + 2 q + e is unit
// 16 p + 2 q + e, where j = 2 G p + g. Of a last group of 4 units, of a cell with 4 gates, it is
// unit 16 p + q and gate 2 i + e, where j = 8 p + i.
struct Place {
  int gate, unit;
};
DEVICE Place place_of_column(int column, int gates, int units) {
  const int j = column / 8, q = column / 2 % 4, full = units / 16;
  if (const int i = j - 2 * gates * full; i >= 0) {
    if (units % 8 == 4) return {2 * i + column % 2, full * 16 + q};
    return {i, full * 16 + 2 * q + column % 2};
  }
  const int pair = j / 2, k = j % 2;
  return {pair % gates, pair / gates * 16 + 4 * q + 2 * k + column % 2};
}

}  // namespace flashcell::cuda::batch
