// What a thread block of the whole-chip engine holds, and which heads it takes: pure functions of
// the shape, for the planner, the launch and the kernel alike.
#pragma once
#include "engine.h"
#include "tiles.h"

namespace flashcell::cuda::chip {

constexpr int kWarps = tiles::kChipWarps, kProducts = 32 * kWarps;  // the threads of the product
constexpr int kCellWarps = 4, kCells = 32 * kCellWarps;  // a thread for each unit and 8 columns
constexpr int kUnits =
    tiles::kChipUnits;           // of a thread block: the height of the matrix instruction
constexpr int kChunkBytes = 64;  // of the depth a warp takes at a time: four lanes, a vector each
constexpr int kTiles =
    tiles::kChipTiles;  // a group alternates between: more than hides an exchange
constexpr int kStages = tiles::kChipStages;  // of the input ring
constexpr int kColumnBytes = 32;

// One pass of one cell. A product is row_tiles * 16 rows by panels * D deep.
struct Shape {
  int row_tiles, panels;
  int inputs;  // rows of 16 units a step reads: x, or saved and dh
  int states, sums;
  int element;   // bytes
  int split;     // thread blocks that share a product
  int wide = 1;  // matrix instructions side by side: a tile is 8 or 16 sequences
};

constexpr Shape forward_shape(int gates, int states, int element, int wide = 1) {
  return {gates, 1, gates, states, 0, element, 1, wide};
}
constexpr Shape backward_shape(int gates, int states, int saved, int bias_rows, int element,
                               int split = 1, int wide = 1) {
  return {split, gates / split, saved + 1, states, bias_rows, element, split, wide};
}

constexpr int tile_columns(const Shape& s) { return 8 * s.wide; }        // of a tile
constexpr int tiles_at_once(const Shape& s) { return kTiles / s.wide; }  // of a round

// A tile of sixteen sequences needs the registers that a wider head's weight would take.
constexpr int kWideHeld = 96, kWideBlocks = 4;

// Chunks whose weights stay in 128 registers a lane: the rest is read from shared memory at every
// step. A block of the depth is one chunk of every panel for every warp; the kernel is unrolled for
// max_blocks of them.
constexpr int held_chunks(const Shape& s) {
  return (s.wide > 1 ? kWideHeld : tiles::kChipHeld) / 8 / s.row_tiles;
}
constexpr int max_blocks(const Shape& s) {
  if (s.wide > 1) return kWideBlocks;
  const int by_memory = tiles::kChipChunks / (s.row_tiles * s.panels);
  return by_memory < tiles::kChipBlocks ? by_memory : tiles::kChipBlocks;
}

// Chunks of operands on their way to a lane: as many as divide them all and registers are left for.
constexpr int chunks_ahead(const Shape& s, int blocks, bool marked) {
  const int chunks = blocks * s.panels;
  if (s.wide > 1) {
    return chunks <= 3 ? chunks : chunks % 3 == 0 ? 3 : 2;
  }
  const int most = chunks * s.row_tiles <= 12 ? 12 : marked || s.row_tiles == 3 ? 4 : 8;
  int ahead = chunks < most ? chunks : most;
  while (chunks % ahead != 0) --ahead;
  return ahead;
}

// Twice the warps run the cell when weights and operands leave them the registers.
constexpr int cell_halves(const Shape& s, int blocks, bool marked) {
  if (s.wide > 1) return 2;
  const int weights = 8 * blocks * s.panels * s.row_tiles;
  return weights + 4 * chunks_ahead(s, blocks, marked) <= 108 ? 2 : 1;
}

// A kernel is made for so many blocks of the depth, or for up to so many: those look.
constexpr bool is_exact(int blocks, bool marked) { return !marked && (blocks <= 4 || blocks == 8); }

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Tiles of sixteen sequences pay where a group has many of eight; the registers are those of
// sm_90a.
constexpr bool takes_wide_tiles(const Shape& s, int64_t S, int64_t N, int64_t D,
                                const Device& device) {
  const int64_t groups = device.processors / (N * divide_up(D, kUnits));
  const int few = s.sums > 0 ? 4 : 3;  // backward, forward: measured
  return device.arch == 90 && divide_up(S, 8) > few * (groups > 1 ? groups : 1);
}

constexpr int64_t blocks_of_depth(const Shape& s, int64_t D) {
  return divide_up(D * s.element, kWarps * kChunkBytes);
}

// From the bytes that all thread blocks poll for a step of one tile each to the clocks that a
// forward step leaves between a block's own part and its first look at all of them. Measured in 16
// bits: at 2.1 MB 450 to 800 clocks help; at 1.2 MB 300 to 450 help little and 150 hurt, so there
// are none.
constexpr unsigned pause_clocks(int64_t polled) {
  return polled > 1'900'000 && polled < 2'200'000 ? 600 : 0;
}

// Sums of all row tiles for a unit and column stand together: a slot. A column of 16 slots is
// padded so that both sides of the reduction hit all banks.
constexpr int slot_floats(int row_tiles) { return row_tiles == 3 ? 4 : row_tiles; }
constexpr int column_slots(int row_tiles) {
  return slot_floats(row_tiles) == 4 ? kUnits + 1 : kUnits + 4 / slot_floats(row_tiles);
}

constexpr int64_t shared_bytes(const Shape& s, int64_t D) {
  const int64_t partials =
      2 * kWarps * tile_columns(s) * column_slots(s.row_tiles) * slot_floats(s.row_tiles) * 4;
  const int64_t ring = kStages * s.inputs * tile_columns(s) * kUnits * s.element;
  const int64_t carried = kTiles * (s.states + s.sums) * 8 * kUnits * 4;
  const int64_t columns = kTiles * (8 * kColumnBytes + 4 + 4 * kCellWarps) + 64;
  const int64_t inbox = s.split > 1 ? 4 * s.split * tile_columns(s) * kUnits * 4 : 0;
  const int64_t spilt = blocks_of_depth(s, D) * s.panels - held_chunks(s);
  return partials + ring + carried + columns + inbox +
         (spilt > 0 ? spilt : 0) * s.row_tiles * 2 * 16 * kProducts;
}

constexpr int64_t thread_blocks(const Shape& s, int64_t D) {  // of a group: whole clusters
  return divide_up(D, kUnits * s.split) * s.split;
}

constexpr bool fits(const Shape& s, int64_t D, const Device& device) {
  return D * s.element % 16 == 0 && thread_blocks(s, D) <= device.processors &&
         blocks_of_depth(s, D) <= max_blocks(s) && shared_bytes(s, D) <= device.shared_bytes;
}

// Both passes of whatever cell: no cell has more than 4 states and bias rows and 7 saved values.
constexpr bool fits_every_cell(int gates, int element, int64_t D, const Device& device) {
  return fits(forward_shape(gates, 4, element), D, device) &&
         fits(backward_shape(gates, 4, 7, 4, element), D, device);
}

}  // namespace flashcell::cuda::chip
