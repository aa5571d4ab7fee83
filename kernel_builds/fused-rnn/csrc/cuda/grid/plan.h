// What a thread block of the grid engine holds, and which heads it takes: pure functions of
// the shape, for the planner, the launch and the kernel alike.
#pragma once
#include <algorithm>

#include "../engine.h"
#include "../limits.h"
#include "../tiles.h"

namespace flashcell::cuda::grid {

constexpr int kWarps = tiles::kGridWarps, kProducts = 32 * kWarps;  // the threads of the product
constexpr int kUnits =
    tiles::kGridUnits;           // of a thread block: the height of the matrix instruction
constexpr int kChunkBytes = 64;  // of the depth a warp takes at a time: four lanes, a vector each
constexpr int kTiles =
    tiles::kGridTiles;  // a group alternates between: more than hides an exchange
constexpr int kStages = tiles::kGridStages;  // of the input ring
constexpr int kColumnBytes = 32;

// One pass of one cell. A product has some rows for each unit and is panels * D deep.
struct Shape {
  int rows, panels;
  int inputs;  // rows of units a step reads: x, or saved and dh
  int states, sums;
  int element;         // bytes
  int split;           // thread blocks that share a product
  int wide = 1;        // matrix instructions side by side: a tile is 8 or 16 sequences
  int units = kUnits;  // of a thread block
};

constexpr Shape forward_shape(int gates, int states, int element, int wide = 1,
                              int units = kUnits) {
  return {gates, 1, gates, states, 0, element, 1, wide, units};
}
constexpr Shape backward_shape(int gates, int states, int saved, int bias_rows, int element,
                               int split = 1, int wide = 1, int units = kUnits) {
  return {split, gates / split, saved + 1, states, bias_rows, element, split, wide, units};
}

// A product is so many instructions high: eight units of a row are half of one.
constexpr int row_tiles(const Shape& s) { return (s.rows * s.units + 15) / 16; }

constexpr int cell_threads(const Shape& s) { return 8 * s.units; }  // each unit of 8 columns
// Where those are not whole fours of warps, between which registers can move, the rest fetch
// inputs.
constexpr int fetch_threads(const Shape& s) { return -cell_threads(s) & 127; }

constexpr int tile_columns(const Shape& s) { return 8 * s.wide; }        // of a tile
constexpr int tiles_at_once(const Shape& s) { return kTiles / s.wide; }  // of a round

// A tile of sixteen sequences needs the registers that a wider head's weight would take.
constexpr int kWideHeld = 96, kWideBlocks = 4;
// Thread blocks of 24 units are made for one depth, that of 768 units in 16 bits: more of the GPU's
// SMs have a part of it.
constexpr int kTallUnits = 24, kTallBlocks = 3;
constexpr bool has_tall_blocks(int gates, int element) { return gates == 4 && element == 2; }

// Chunks whose weights stay in 128 registers a lane: the rest is read from shared memory at every
// step. A block of the depth is one chunk of every panel for every warp; the kernel is unrolled for
// max_blocks of them.
constexpr int held_chunks(const Shape& s) {
  return (s.wide > 1 ? kWideHeld : tiles::kGridHeld) / 8 / row_tiles(s);
}
constexpr int least_blocks(const Shape& s, bool marked) {
  return s.units > kUnits ? kTallBlocks : marked ? 4 : 1;
}
constexpr int max_blocks(const Shape& s) {
  if (s.units > kUnits) return kTallBlocks;
  if (s.wide > 1) return kWideBlocks;
  const int by_memory = tiles::kGridChunks / (row_tiles(s) * s.panels);
  return by_memory < tiles::kGridBlocks ? by_memory : tiles::kGridBlocks;
}

// Chunks of operands on their way to a lane: as many as divide them all and registers are left for.
constexpr int chunks_ahead(const Shape& s, int blocks, bool marked) {
  const int chunks = blocks * s.panels;
  if (s.wide > 1) {
    return chunks <= 3 ? chunks : chunks % 3 == 0 ? 3 : 2;
  }
  const int most = chunks * row_tiles(s) <= 12 ? 12 : marked || row_tiles(s) == 3 ? 4 : 8;
  int ahead = chunks < most ? chunks : most;
  while (chunks % ahead != 0) --ahead;
  return ahead;
}

// Twice the warps run the cell when weights and operands leave them the registers.
constexpr int cell_halves(const Shape& s, int blocks, bool marked) {
  if (s.units > kUnits) return 1;
  if (s.wide > 1) return 2;
  const int weights = 8 * blocks * s.panels * row_tiles(s);
  return weights + 4 * chunks_ahead(s, blocks, marked) <= 108 ? 2 : 1;
}

// A kernel is made for so many blocks of the depth, or for up to so many: those look.
constexpr bool is_exact(int blocks, bool marked) { return !marked && (blocks <= 4 || blocks == 8); }

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t blocks_of_depth(const Shape& s, int64_t D) {
  return divide_up(D * s.element, kWarps * kChunkBytes);
}
constexpr int64_t thread_blocks(const Shape& s, int64_t D) {  // of a group: whole clusters
  return divide_up(D, s.units * s.split) * s.split;
}

// Tiles of sixteen sequences pay where a group has many of eight; the registers are those of
// sm_90a.
constexpr bool takes_wide_tiles(const Shape& s, int64_t S, int64_t N, int64_t D,
                                const Device& device) {
  const int64_t groups = device.sms / (N * divide_up(D, kUnits));
  const int few = s.sums > 0 ? 4 : 3;  // backward, forward: measured
  return device.code.sm_90a && divide_up(S, 8) > few * (groups > 1 ? groups : 1);
}

// From the bytes that all thread blocks poll for a step of one tile each to the clocks that a
// forward step leaves between a block's own part and its first look at all of them. Measured in 16
// bits: at 2.1 MB 450 to 800 clocks help; at 1.2 MB 300 to 450 help little and 150 hurt, so there
// are none.
constexpr unsigned pause_clocks(int64_t polled) {
  return polled > 1'900'000 && polled < 2'200'000 ? 600 : 0;
}

// Sums of all rows of a unit and column stand together: a slot. A column of slots is
// padded so that both sides of the reduction hit all banks.
constexpr int slot_floats(const Shape& s) { return s.rows == 3 ? 4 : s.rows; }
constexpr int column_slots(const Shape& s) { return s.units + 4 / slot_floats(s); }

constexpr int64_t shared_bytes(const Shape& s, int64_t D) {
  const int64_t partials = 2 * kWarps * tile_columns(s) * column_slots(s) * slot_floats(s) * 4;
  const int64_t ring = kStages * s.inputs * tile_columns(s) * s.units * s.element;
  const int64_t carried = kTiles * (s.states + s.sums) * 8 * s.units * 4;
  const int64_t columns = kTiles * (8 * kColumnBytes + 4 + cell_threads(s) / 8) + 64 +
                          (fetch_threads(s) > 0 ? 16 * kStages : 0);
  const int64_t inbox = s.split > 1 ? 4 * s.split * tile_columns(s) * s.units * 4 : 0;
  const int64_t spilt = blocks_of_depth(s, D) * s.panels - held_chunks(s);
  return partials + ring + carried + columns + inbox +
         (spilt > 0 ? spilt : 0) * row_tiles(s) * 2 * 16 * kProducts;
}

// Tall blocks pay where they make more groups, which then have fewer tiles; measured.
constexpr bool takes_tall_blocks(const Shape& s, int64_t S, int64_t N, int64_t D,
                                 const Device& device) {
  Shape tall = s;
  tall.units = kTallUnits;
  const int64_t groups = device.sms / (N * divide_up(D, kUnits));
  const int64_t more = device.sms / (N * thread_blocks(tall, D));
  return device.code.sm_90a && s.element == 2 && blocks_of_depth(s, D) == kTallBlocks &&
         more > groups && divide_up(S, 8) > 2 * (groups > 1 ? groups : 1);
}

// Whether the shape is the one for so many sequences, if it fits; the widest is asked first.
constexpr bool takes(const Shape& s, bool marked, int64_t S, int64_t N, int64_t D,
                     const Device& device) {
  if (s.wide > 1 && marked) return false;
  if (s.units == kUnits) return s.wide == 1 || takes_wide_tiles(s, S, N, D, device);
  const int64_t groups = device.sms / (N * thread_blocks(s, D));
  return takes_tall_blocks(s, S, N, D, device) && (s.wide == 1 || divide_up(S, 8) > 3 * groups);
}

constexpr std::array<Limit, 4> limits(const Shape& s, int64_t D, const Device& device) {
  return {{{"row in whole vectors, bytes over", D * s.element % 16, 0, "bytes"},
           {"thread blocks at once", thread_blocks(s, D), device.sms, "SMs"},
           {"depth unrolled", blocks_of_depth(s, D), max_blocks(s), "blocks of depth"},
           {"shared memory", shared_bytes(s, D), device.shared_bytes, "bytes"}}};
}

constexpr bool fits(const Shape& s, int64_t D, const Device& device) {
  return all_hold(limits(s, D, device)) &&
         (s.units == kUnits || blocks_of_depth(s, D) == kTallBlocks);
}

// Whether a kernel of the shape runs the call, as far as sizes and code decide. Of a shape whose
// thread blocks share products, has_room decides as well.
constexpr bool can_run(const Shape& s, bool marked, int64_t S, int64_t N, int64_t D,
                       const Device& device) {
  return takes(s, marked, S, N, D, device) && fits(s, D, device) &&
         (s.split == 1 || device.code.arch >= 90);
}

constexpr int64_t tiles_of(const Shape& s, int64_t S) { return divide_up(S, tile_columns(s)); }

// Whether enough thread blocks run `together`. Not every SM can be part of a large cluster: no
// reason to leave half of them idle.
constexpr bool has_room(const Shape& s, int64_t S, int64_t N, int64_t D, int64_t together,
                        const Device& device) {
  const int64_t members = thread_blocks(s, D);
  if (together < members) return false;
  const int64_t groups_at_most = device.sms / (N * divide_up(D, s.units));
  return s.split <= 2 || together / (N * members) >= std::min(groups_at_most, tiles_of(s, S));
}

// What the driver is expected to run at once, for who cannot ask it: a thread block to an SM, and a
// cluster of more than two within a part of the GPU that has 16 to 18 SMs.
constexpr int64_t expected_together(const Shape& s, const Device& device) {
  const int64_t clusters = s.split <= 2 ? device.sms / s.split : device.sms / 18 * (16 / s.split);
  return clusters * s.split;
}

constexpr int64_t heads_at_once(const Shape& s, int64_t N, int64_t D, int64_t together) {
  const int64_t launches = divide_up(N, together / thread_blocks(s, D));
  return divide_up(N, launches);
}
constexpr int64_t groups_of(const Shape& s, int64_t S, int64_t heads, int64_t D, int64_t together) {
  return std::clamp<int64_t>(together / (heads * thread_blocks(s, D)), 1, tiles_of(s, S));
}

// What kernels of a pass are compiled for, beside the cell.
struct Variant {
  int split = 1, wide = 1, units = kUnits;
};
struct Variants {
  Variant list[6];
  int count = 0;

  constexpr void add(Variant variant) { list[count++] = variant; }
};

// In the order in which a launch asks whether they run a call; the last is the plain one.
constexpr Variants forward_variants(int gates, int element) {
  Variants all;
  if (has_tall_blocks(gates, element)) {
    all.add({1, 2, kTallUnits});
    all.add({1, 1, kTallUnits});
  }
  all.add({1, 2});
  all.add({});
  return all;
}
constexpr Variants backward_variants(int gates, int element) {
  Variants all;
  if (has_tall_blocks(gates, element)) {
    all.add({2, 2, kTallUnits});
    all.add({2, 1, kTallUnits});
  }
  all.add({gates, 2});
  if (gates > 1) all.add({gates});
  if (gates == 4) all.add({2});
  all.add({});
  return all;
}

// Both passes of whatever cell: no cell has more than 4 states and bias rows and 7 saved values.
struct Passes {
  Shape forward, backward;
};
constexpr Passes shapes_of_every_cell(int gates, int element) {
  return {forward_shape(gates, 4, element), backward_shape(gates, 4, 7, 4, element)};
}
constexpr bool fits_every_cell(int gates, int element, int64_t D, const Device& device) {
  const Passes passes = shapes_of_every_cell(gates, element);
  return fits(passes.forward, D, device) && fits(passes.backward, D, device);
}

}  // namespace flashcell::cuda::grid
