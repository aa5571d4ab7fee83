// What a thread block of the whole-chip engine holds, and which heads it takes: pure functions of
// the shape, for the planner, the launch and the kernel alike.
#pragma once
#include "engine.h"

namespace flashcell::cuda::chip {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kUnits = 16;       // of a thread block: the height of the matrix instruction
constexpr int kChunkBytes = 64;  // of the depth a warp takes at a time: four lanes, a vector each
constexpr int kTiles = 8;        // a group alternates between: more than hides an exchange
constexpr int kStages = 6;       // of the input ring
constexpr int kPartialRow = 20;  // 16 units, padded: both sides of the reduction hit 32 banks
constexpr int kColumnBytes = 32;

// One pass of one cell. A product is row_tiles * 16 rows by panels * D deep.
struct Shape {
  int row_tiles, panels;
  int inputs;  // rows of 16 units a step reads: x, or saved and dh
  int states, sums;
  int element;  // bytes
};

constexpr Shape forward_shape(int gates, int states, int element) {
  return {gates, 1, gates, states, 0, element};
}
constexpr Shape backward_shape(int gates, int states, int saved, int bias_rows, int element) {
  return {1, gates, saved + 1, states, bias_rows, element};
}

// Chunks whose weights stay in 128 registers a lane: the rest is read from shared memory at every
// step. A block of the depth is one chunk of every panel for every warp; the kernel is unrolled for
// max_blocks of them.
constexpr int held_chunks(const Shape& s) { return 16 / s.row_tiles; }
constexpr int max_blocks(const Shape& s) {
  const int by_memory = 36 / (s.row_tiles * s.panels);
  return by_memory < 16 ? by_memory : 16;
}

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t blocks_of_depth(const Shape& s, int64_t D) {
  return divide_up(D * s.element, kWarps * kChunkBytes);
}

constexpr int64_t shared_bytes(const Shape& s, int64_t D) {
  const int64_t partials = 2 * kWarps * s.row_tiles * 8 * kPartialRow * 4;
  const int64_t ring = kStages * s.inputs * 8 * kUnits * s.element;
  const int64_t carried = kTiles * (s.states + s.sums) * 8 * kUnits * 4;
  const int64_t columns = kTiles * (8 * kColumnBytes + 4) + 8 * kStages + 16,
                bias = (s.row_tiles + 1) * kUnits * 4;
  const int64_t spilt = blocks_of_depth(s, D) * s.panels - held_chunks(s);
  return partials + ring + carried + columns + bias +
         (spilt > 0 ? spilt : 0) * s.row_tiles * 2 * 16 * kThreads;
}

constexpr bool fits(const Shape& s, int64_t D, const Device& device) {
  return D * s.element % 16 == 0 && divide_up(D, kUnits) <= device.processors &&
         blocks_of_depth(s, D) <= max_blocks(s) && shared_bytes(s, D) <= device.shared_bytes;
}

// Both passes of whatever cell: no cell has more than 4 states and bias rows and 7 saved values.
constexpr bool fits_every_cell(int gates, int element, int64_t D, const Device& device) {
  return fits(forward_shape(gates, 4, element), D, device) &&
         fits(backward_shape(gates, 4, 7, 4, element), D, device);
}

}  // namespace flashcell::cuda::chip
