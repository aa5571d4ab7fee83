// Decides whether the batch engine runs a call, and with which tiles.
//
// A thread block computes tiles of sequences by hidden units: a matrix product over the whole depth
// D, then the cells. It reads (sequences + G units) D elements from L2 for a tile at every step, or
// sequences D where the weights stay in shared memory.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "../../params.h"
#include "../engine.h"
#include "../limits.h"

namespace flashcell::cuda::batch {

constexpr int kRowBytes = 128;     // of an operand in a stage
constexpr int kThreads = 3 * 128;  // one warpgroup copies, two multiply and compute the cells
constexpr int kMostShared = 225 << 10;
constexpr int kMostStages = 8;

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
// Elements of the depth in a stage, and the stages of a depth.
constexpr int depth_of_panel(int io_bytes) { return kRowBytes / io_bytes; }
constexpr int64_t panels_of(int64_t D, int io_bytes) {
  return divide_up(D, depth_of_panel(io_bytes));
}

struct Tile {
  int blocks;  // of 64 sequences, for each warpgroup
  int units;   // a multiple of 8
  // Whether the two warpgroups take turns with tiles of their own: one multiplies while the other
  // runs cells and waits. Otherwise they have halves of the same tile.
  bool turns;
  // Whether the weights of the units stay in shared memory. A thread block then has one tile.
  bool resident = false;

  constexpr int warpgroups() const { return turns ? 1 : 2; }  // of a tile
  constexpr int rows() const { return 64 * blocks * warpgroups(); }
  constexpr int stage_bytes(int gates) const {
    return (rows() + (resident ? 0 : units * gates)) * kRowBytes;
  }
  constexpr int resident_bytes(int gates, int panels) const {
    return resident ? panels * units * gates * kRowBytes : 0;
  }
  // Tiles of a thread block whose state stays in shared memory, and the bytes of one. What is left
  // holds stages, of which wider tiles need more.
  constexpr int kept_tiles() const { return !turns ? 1 : units > 32 ? 2 : 4; }
  constexpr int state_bytes() const { return rows() * units * int(sizeof(float)); }
  constexpr int kept_bytes(bool keeps) const { return keeps ? kept_tiles() * state_bytes() : 0; }
  // `panels` of the depth matter where weights are resident.
  constexpr int stages(int gates, bool keeps, int panels) const {
    const int rest = kMostShared - kept_bytes(keeps) - resident_bytes(gates, panels);
    return std::min(kMostStages, rest / stage_bytes(gates));
  }
  constexpr int shared_bytes(int gates, bool keeps, int panels) const {
    return 1024 + stages(gates, keeps, panels) * (stage_bytes(gates) + 16) + 32 +
           kept_bytes(keeps) + resident_bytes(gates, panels);
  }
};
constexpr int kLeastStages = 4;  // where weights are resident: 1216 units of an LSTM at most

// Whether the state of some tiles stays in shared memory: that of cells whose step reads one.
constexpr bool keeps_state(const CellSizes& cell) { return cell.states - !cell.reads_h == 1; }

// The tiles that are compiled for a cell of so many gates: the first `count` of `list`; in fp32
// only of three and four gates. Where the last one has kWideUnits units, it is for cells whose
// state stays in shared memory, and in 16 bits for passes that save nothing: in others it is
// slower.
constexpr int kWideUnits = 40;
constexpr bool saves_wide(int io_bytes) { return io_bytes == 4; }
struct Tiles {
  int count;
  Tile list[6];

  constexpr const Tile& operator[](int i) const { return list[i]; }
  constexpr int count_with(bool has_wide) const {
    return count - (count > 0 && list[count - 1].units == kWideUnits && !has_wide);
  }
};
constexpr Tiles tiles(int gates, int io_bytes) {
  const Tile turns{2, 32, true}, wide{2, kWideUnits, true};
  if (io_bytes == 4) {
    if (gates == 3) return {4, {turns, {1, 32, false}, {1, 32, true}, wide}};
    if (gates == 4) return {5, {turns, {1, 16, false}, {1, 16, true}, {1, 24, true}, wide}};
    return {};
  }
  const int units = gates > 1 ? 32 : 64;
  return {gates == 4 ? 6 : 3,
          {{2, units, true},
           {2, units, false},
           {1, units, false},
           {1, 16, false},
           {1, 16, false, true},
           wide}};
}

struct Sizes {
  int64_t S, N, D;
  int gates, io_bytes;
  bool keeps = false;  // the cell's keeps_state
  bool saves = false;  // the forward pass saves values for a backward pass

  constexpr bool has_wide() const { return keeps && (!saves || saves_wide(io_bytes)); }
};

constexpr int64_t count_tiles(const Tile& tile, const Sizes& z) {
  return z.N * divide_up(z.S, tile.rows()) * divide_up(z.D, tile.units);
}

// As many thread blocks as run at once, or fewer if they then have as few tiles each.
constexpr int64_t count_blocks(int64_t tiles, const Device& device) {
  return divide_up(tiles, divide_up(tiles, device.sms));
}

// What a step takes, in us: for each tile of a thread block a time per panel of the depth, and a
// time for the cells and the exchange, other ones where tiles would take turns and a block has one;
// or the loads from L2 are the limit.
struct Cost {
  double panel, tile, panel_alone, tile_alone;
  double bytes;  // from L2 in a us
};
// Of `tiles` in 16 bits, for LSTMs on an H200, without values to save and with them: see
// NOTEBOOK.md, "The batch engine". A GRU's panels take less.
constexpr Cost kCosts[2][6] = {{{0.32, 3, 0.44, 4.6, 8.2e6},
                                {0.58, 8, 0.58, 8, 6.6e6},
                                {0.42, 3.3, 0.42, 3.3, 7.6e6},
                                {0.335, 2.25, 0.335, 2.25, 7.6e6},
                                {0.335, 1.95, 0.335, 1.95, 7.6e6},
                                {0.43, 4.7, 0.59, 5.4, 8.6e6}},
                               {{0.3, 4.3, 0.42, 5.6, 9.1e6},
                                {0.54, 8.1, 0.54, 8.1, 6.0e6},
                                {0.41, 4.6, 0.41, 4.6, 6.3e6},
                                {0.36, 3.4, 0.36, 3.4, 6.6e6},
                                {0.385, 2.05, 0.385, 2.05, 6.6e6},
                                {}}};

// The same in fp32, of an LSTM and of a GRU.
constexpr Cost kLstmCosts32[2][5] = {{{0.384, 3.9, 0.38, 5.9, 9.7e6},
                                      {0.391, 1.9, 0.391, 1.9, 7.4e6},
                                      {0.33, 1.1, 0.338, 1.5, 6.3e6},
                                      {0.339, 2, 0.358, 2.5, 7.6e6},
                                      {0.45, 5.7, 0.454, 7.9, 9.3e6}},
                                     {{0.208, 8.4, 0.403, 8.2, 9.6e6},
                                      {0.444, 2, 0.444, 2, 7e6},
                                      {0.332, 1.1, 0.355, 1.6, 7.5e6},
                                      {0.343, 2, 0.384, 2.7, 7.7e6},
                                      {0.377, 9.8, 0.474, 10.6, 8.4e6}}};
constexpr Cost kGruCosts32[2][4] = {{{0.359, 3.5, 0.398, 6.6, 9.3e6},
                                     {0.443, 3.9, 0.443, 3.9, 7.5e6},
                                     {0.342, 1.8, 0.365, 3.2, 7.6e6},
                                     {0.419, 4, 0.479, 6.9, 9e6}},
                                    {{0.251, 6.4, 0.403, 7.9, 9.1e6},
                                     {0.439, 6.1, 0.439, 6.1, 7.1e6},
                                     {0.345, 1.7, 0.381, 4.1, 7.8e6},
                                     {0.292, 7.7, 0.466, 9.3, 9e6}}};
constexpr const Cost& cost_of(int index, const Sizes& z) {
  if (z.io_bytes == 2) return kCosts[z.saves][index];
  return z.gates == 3 ? kGruCosts32[z.saves][index] : kLstmCosts32[z.saves][index];
}

constexpr double step_us(int index, const Sizes& z, const Device& device) {
  const Tile tile = tiles(z.gates, z.io_bytes)[index];
  const Cost cost = cost_of(index, z);
  const double rounds = double(divide_up(count_tiles(tile, z), device.sms));
  const double panels = double(panels_of(z.D, z.io_bytes)), gates = double(z.gates) / 4;
  if (tile.resident && (rounds > 1 || tile.stages(z.gates, z.keeps, int(panels)) < kLeastStages)) {
    return std::numeric_limits<double>::infinity();
  }
  const double depth = z.io_bytes == 2 ? panels * (0.3 + 0.7 * gates) : panels;
  const bool alone = tile.turns && rounds == 1;
  const double us = rounds * ((alone ? cost.panel_alone : cost.panel) * depth +
                              (alone ? cost.tile_alone : cost.tile));
  const double cells = double(z.S * z.N) * double(z.D) * gates;
  const double bytes = rounds * device.sms * tile.stage_bytes(z.gates) * panels;
  return std::max(us, (bytes + (z.saves ? 17 : 10) * z.io_bytes * cells) / cost.bytes);
}

// The index in `tiles` of the tile that takes the least time.
constexpr int best_tile(const Sizes& z, const Device& device) {
  int best = 0;
  for (int i = 1; i < tiles(z.gates, z.io_bytes).count_with(z.has_wide()); ++i) {
    if (step_us(i, z, device) < step_us(best, z, device)) best = i;
  }
  return best;
}

constexpr std::array<Limit, 3> limits(const Sizes& z, const Device& device) {
  constexpr int64_t kMostElements = (int64_t(1) << 30) - 1;  // offsets in a state fit in 32 bits
  const bool overflows = z.S * z.N > kMostElements / z.D;
  const int64_t elements = overflows ? kMostElements + 1 : z.S * z.N * z.D;
  return {
      {{"instructions of code for 9.0a", !device.code.sm_90a, 0, ""},
       {"fp32 of a cell of other than 3 or 4 gates", tiles(z.gates, z.io_bytes).count == 0, 0, ""},
       {"a state", elements, kMostElements, "elements"}}};
}

// The same for the engines that would run the call otherwise. In one pass the grid engine runs 64
// sequences (32 in fp32) of as many heads as fit on the GPU at once.
constexpr double grid_us(const Sizes& z, const Device& device) {
  const int64_t heads = std::max<int64_t>(1, device.sms / divide_up(z.D, 16));
  const double passes = double(divide_up(divide_up(z.S, 128 / z.io_bytes) * z.N, heads));
  if (z.io_bytes == 4) return passes * (z.D > 896 ? 5 : z.D > 640 ? 5.35 : z.D > 512 ? 4 : 2.2);
  return passes * (z.D > 1056 ? 9 : z.D > 768 ? 4.8 : 3.0);
}
constexpr double gemm_us(const Sizes& z) {
  const double sums = double(z.S * z.N) * double(z.D) * z.gates, large = sums / 1e6 - 1;
  const double product = sums * double(z.D) * 2;
  if (z.io_bytes == 4) return 9.5 + product / 300e6 + std::max(0.0, large) * 4.3;
  return 8 + product / 700e6 + std::max(0.0, large) * 3.1;
}

// Whether this engine is faster than `other`, which runs the call otherwise, by more than the costs
// are wrong. The weights of wider heads do not stay in L2; narrower ones are faster in clusters;
// short calls and cells of one or two gates were not measured.
constexpr bool is_faster(const Sizes& z, int64_t T, Engine other, const Device& device) {
  const int64_t weights = z.D * z.D * z.N * z.gates;
  if (T < 16 || z.D <= 256 || weights > 40'000'000 / z.io_bytes || z.gates < 3) return false;
  const double us = step_us(best_tile(z, device), z, device) / (z.io_bytes == 4 ? 0.95 : 0.9);
  if (other == Engine::kGrid || other == Engine::kCluster) return us < grid_us(z, device);
  return other == Engine::kGemm && us < gemm_us(z);
}

// What a launch works on. The operands are stored as their stages will lie in shared memory: for
// every head a panel for every kRowBytes of the depth, swizzled; fp32 is rounded to TF32.
struct Work {
  int D, N, unit_tiles, row_tiles;
  int panels;             // of the depth
  int stages;             // where weights are resident
  bool has_initial;       // whether the first step has a product
  int64_t row_capacity;   // rows of a panel of h: S rounded up to whole tiles
  int64_t operand_bytes;  // of one buffer of h
  char* weight;           // [N, unit tiles, panels, columns] rows
  char* operand;          // [2, N, panels, row_capacity] rows: h after even and after odd steps
  float* bias;            // [N, bias rows, units of all tiles]
  unsigned* published;    // [N, row tiles], counts the warpgroups that have published their tile
  int64_t bytes;          // of the buffers

  Work(const SequenceParams& p, int gates, int bias_rows, int io_bytes, const Tile& tile,
       void* scratch) {
    D = int(p.D), N = int(p.N), has_initial = false;
    unit_tiles = int(divide_up(p.D, tile.units)), row_tiles = int(divide_up(p.S, tile.rows()));
    panels = int(panels_of(p.D, io_bytes)), stages = 0;
    row_capacity = int64_t(row_tiles) * tile.rows();
    operand_bytes = int64_t(N) * panels * row_capacity * kRowBytes;
    const auto next = [](int64_t size) { return (size + 255) / 256 * 256; };
    char* const start = static_cast<char*>(scratch);
    const int64_t units = int64_t(unit_tiles) * tile.units;
    weight = start;
    operand = weight + N * units * panels * gates * kRowBytes;
    bias = reinterpret_cast<float*>(operand + 2 * operand_bytes);
    const int64_t biases = N * bias_rows * units * int64_t(sizeof(float));
    published = reinterpret_cast<unsigned*>(reinterpret_cast<char*>(bias) + next(biases));
    bytes = reinterpret_cast<char*>(published + int64_t(N) * row_tiles) - start;
  }
};

inline int64_t scratch_bytes(const SequenceParams& p, const CellSizes& cell, int io_bytes,
                             const Device& device) {
  const auto bytes = [&](bool saves) {
    const Sizes sizes{p.S, p.N, p.D, cell.gates, io_bytes, keeps_state(cell), saves};
    const Tile tile = tiles(cell.gates, io_bytes)[best_tile(sizes, device)];
    return Work(p, cell.gates, cell.bias_rows, io_bytes, tile, nullptr).bytes;
  };
  return std::max(bytes(false), bytes(true));
}

}  // namespace flashcell::cuda::batch
