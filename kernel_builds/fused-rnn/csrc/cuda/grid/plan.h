// Decides which heads the grid engine runs, and with which sizes: pure functions of the shape, used
// by the planner, the launch and the kernel.
#pragma once
#include <algorithm>

#include "../engine.h"
#include "../limits.h"
#include "../tiles.h"

namespace flashcell::cuda::grid {

// kProducts is the number of threads that multiply.
constexpr int kWarps = tiles::kGridWarps, kProducts = 32 * kWarps;
constexpr int kUnits =
    tiles::kGridUnits;  // units of a thread block: the height of the matrix instruction
// Bytes of the depth that a warp takes at a time: a vector for each of four lanes.
constexpr int kChunkBytes = 64;
constexpr int kTiles =
    tiles::kGridTiles;  // tiles that a group alternates between: enough to hide an exchange
constexpr int kStages = tiles::kGridStages;  // stages of the input ring
constexpr int kColumnBytes = 32;

// The sizes of one pass of one cell. The product has `rows` rows for each unit, and is panels * D
// deep.
struct Shape {
  int rows, panels;
  int inputs;  // rows of units that a step reads: x, or saved values and dh
  int states, sums;
  int element;         // bytes of an I/O element
  int split;           // thread blocks that share a product
  int wide = 1;        // matrix instructions side by side: a tile is 8 or 16 sequences
  int units = kUnits;  // units of a thread block
};

constexpr Shape forward_shape(int gates, int states, int element, int wide = 1,
                              int units = kUnits) {
  return {gates, 1, gates, states, 0, element, 1, wide, units};
}
constexpr Shape backward_shape(int gates, int states, int saved, int bias_rows, int element,
                               int split = 1, int wide = 1, int units = kUnits) {
  return {split, gates / split, saved + 1, states, bias_rows, element, split, wide, units};
}

// The product's height in matrix instructions, each of which has 16 rows: eight units of two rows.
constexpr int row_tiles(const Shape& s) { return (s.rows * s.units + 15) / 16; }

// One thread for each unit and each of 8 columns.
constexpr int cell_threads(const Shape& s) { return 8 * s.units; }
// Registers move only between whole groups of four warps. Where the cell's warps do not fill such
// groups, the warps that fill them up fetch inputs.
constexpr int fetch_threads(const Shape& s) { return -cell_threads(s) & 127; }

constexpr int tile_columns(const Shape& s) { return 8 * s.wide; }        // sequences of a tile
constexpr int tiles_at_once(const Shape& s) { return kTiles / s.wide; }  // tiles of a round

// A tile of sixteen sequences uses registers that would hold the weight of a wider head.
constexpr int kWideHeld = 96, kWideBlocks = 4;
// Thread blocks of 24 units (tall blocks) are compiled for one depth only, that of 768 units in 16
// bits; they use more of the GPU's SMs there.
constexpr int kTallUnits = 24, kTallBlocks = 3;
constexpr bool has_tall_blocks(int gates, int element) { return gates == 4 && element == 2; }

// The number of chunks whose weights stay in registers (128 per lane); the others are read from
// shared memory in every step. A block of the depth has one chunk of every panel for every warp.
// The kernel is unrolled for at most max_blocks of them.
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

// The number of operand chunks that a lane loads ahead: a divisor of all chunks for which registers
// are left.
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

// Two halves of cell warps are used if weights and operands leave enough registers.
constexpr int cell_halves(const Shape& s, int blocks, bool marked) {
  if (s.units > kUnits) return 1;
  if (s.wide > 1) return 2;
  const int weights = 8 * blocks * s.panels * row_tiles(s);
  return weights + 4 * chunks_ahead(s, blocks, marked) <= 108 ? 2 : 1;
}

// A kernel is compiled for an exact number of blocks of the depth, or for a maximum, which then has
// to be compared at run time.
constexpr bool is_exact(int blocks, bool marked) { return !marked && (blocks <= 4 || blocks == 8); }

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t blocks_of_depth(const Shape& s, int64_t D) {
  return divide_up(D * s.element, kWarps * kChunkBytes);
}
// Thread blocks of a group: a whole number of clusters.
constexpr int64_t thread_blocks(const Shape& s, int64_t D) {
  return divide_up(D, s.units * s.split) * s.split;
}

// Tiles of sixteen sequences pay if a group has many tiles of eight. They need the registers that
// setmaxnreg moves (sm_90a).
constexpr bool takes_wide_tiles(const Shape& s, int64_t S, int64_t N, int64_t D,
                                const Device& device) {
  const int64_t groups = device.sms / (N * divide_up(D, kUnits));
  const int few = s.sums > 0 ? 4 : 3;  // measured; backward, then forward
  return device.code.sm_90a && divide_up(S, 8) > few * (groups > 1 ? groups : 1);
}

// The clocks that a block waits in a forward step between publishing its own part and first polling
// the others' parts, by the bytes that all thread blocks poll for one tile each. Measured with
// 16-bit I/O: at 2.1 MB 450 to 800 clocks help; at 1.2 MB 300 to 450 clocks help little and 150
// hurt, so there are none.
constexpr unsigned pause_clocks(int64_t polled) {
  return polled > 1'900'000 && polled < 2'200'000 ? 600 : 0;
}

// The partial sums of all rows of one unit and column are adjacent: a slot. Columns of slots are
// padded so that the writers and the readers of partial sums hit all banks.
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

// Tall blocks pay if they allow more groups, each of which then has fewer tiles (measured), or if
// the heads then need fewer launches, which run one after the other.
constexpr bool takes_tall_blocks(const Shape& s, int64_t S, int64_t N, int64_t D,
                                 const Device& device) {
  if (!device.code.sm_90a || s.element != 2 || blocks_of_depth(s, D) != kTallBlocks) return false;
  Shape tall = s;
  tall.units = kTallUnits;
  const int64_t heads = device.sms / divide_up(D, kUnits);  // heads that run at once
  const int64_t tall_heads = device.sms / thread_blocks(tall, D);
  if (heads > 0 && divide_up(N, tall_heads) < divide_up(N, heads)) return true;
  const int64_t groups = heads / N, more = tall_heads / N;
  return more > groups && divide_up(S, 8) > 2 * (groups > 1 ? groups : 1);
}

// Whether the planner prefers this shape for so many sequences, if it fits. Wide shapes are tried
// first.
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

constexpr Limit limit_of_code(const Device& device) {
  return {"barriers in shared memory, of code for 8.0 or later", device.code.is_turing(), 0, ""};
}

constexpr bool fits(const Shape& s, int64_t D, const Device& device) {
  return limit_of_code(device).holds() && all_hold(limits(s, D, device)) &&
         (s.units == kUnits || blocks_of_depth(s, D) == kTallBlocks);
}

// Whether a kernel of this shape can run the call, judged by sizes and compiled code. If its thread
// blocks share products, has_room decides as well.
constexpr bool can_run(const Shape& s, bool marked, int64_t S, int64_t N, int64_t D,
                       const Device& device) {
  return takes(s, marked, S, N, D, device) && fits(s, D, device) &&
         (s.split == 1 || device.code.arch >= 90);
}

constexpr int64_t tiles_of(const Shape& s, int64_t S) { return divide_up(S, tile_columns(s)); }

// Whether the GPU can run a whole group of thread blocks at once; `together` is the number that it
// can run. Clusters of more than two cannot use every SM, so with them all groups must fit at once.
constexpr bool has_room(const Shape& s, int64_t S, int64_t N, int64_t D, int64_t together,
                        const Device& device) {
  const int64_t members = thread_blocks(s, D);
  if (together < members) return false;
  const int64_t groups_at_most = device.sms / (N * divide_up(D, s.units));
  return s.split <= 2 || together / (N * members) >= std::min(groups_at_most, tiles_of(s, S));
}

// The number of thread blocks expected to run at once, if the driver cannot be asked: one per SM,
// and clusters of more than two within one part of the GPU (a GPC) of 16 to 18 SMs.
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

// The compile-time choices of a pass's kernel, besides the cell.
struct Variant {
  int split = 1, wide = 1, units = kUnits;
};
struct Variants {
  Variant list[6];
  int count = 0;

  constexpr void add(Variant variant) { list[count++] = variant; }
};

// The variants in the order in which a launch tries them; the last is the plain one.
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

// Shapes of both passes that cover every cell: none has more than 4 states, 4 bias rows and 7 saved
// values.
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
