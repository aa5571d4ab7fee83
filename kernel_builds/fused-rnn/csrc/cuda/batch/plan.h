// Decides whether the batch engine runs a call, and with which tiles.
//
// A thread block computes tiles of sequences by hidden units: a matrix product over the whole depth
// D, then the cells. It reads (sequences + G units) D elements from L2 for a tile at every step.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

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
  int units;   // a multiple of 8, or in 16 bits of 4 for cells with 4 gates
  // Whether the two warpgroups take turns with tiles of their own: one multiplies while the other
  // runs cells and waits. Otherwise they have halves of the same tile.
  bool turns;

  constexpr int warpgroups() const { return turns ? 1 : 2; }  // of a tile
  constexpr int rows() const { return 64 * blocks * warpgroups(); }
  constexpr int stage_bytes(int gates) const { return (rows() + units * gates) * kRowBytes; }
  // Tiles of a thread block whose state stays in shared memory, and the bytes of one. What is left
  // holds stages, of which wider tiles need more.
  constexpr int kept_tiles() const { return !turns ? 1 : units > 32 ? 2 : 4; }
  constexpr int kept_units() const { return int(divide_up(units, 8)) * 8; }  // of a row, with gaps
  constexpr int state_bytes() const { return rows() * kept_units() * int(sizeof(float)); }
  constexpr int kept_bytes(bool keeps) const { return keeps ? kept_tiles() * state_bytes() : 0; }
  constexpr int stages(int gates, bool keeps) const {
    return std::min(kMostStages, (kMostShared - kept_bytes(keeps)) / stage_bytes(gates));
  }
  constexpr int shared_bytes(int gates, bool keeps) const {
    return 1024 + stages(gates, keeps) * (stage_bytes(gates) + 16) + 16 + kept_bytes(keeps);
  }
};

// Whether the state of some tiles stays in shared memory: that of cells whose step reads one.
constexpr bool keeps_state(const CellSizes& cell) { return cell.states - !cell.reads_h == 1; }

// The tiles that are compiled for a cell of so many gates: the first `count` of `list`. The last
// `wide` of them are for cells whose state stays in shared memory, and in 16 bits for passes that
// save nothing: in others they are slower.
constexpr int kMostTiles = 7;
constexpr bool saves_wide(int io_bytes) { return io_bytes == 4; }
struct Tiles {
  int count, wide;
  Tile list[kMostTiles];

  constexpr const Tile& operator[](int i) const { return list[i]; }
  constexpr int count_with(bool has_wide) const { return has_wide ? count : count - wide; }
};
constexpr Tiles tiles(int gates, int io_bytes) {
  const Tile turns{2, 32, true}, wide{2, 40, true};
  if (gates == 1) return {4, 0, {{2, 64, true}, {1, 64, true}, {1, 128, true}, {1, 128, false}}};
  if (gates == 3) return {5, 1, {turns, {1, 32, false}, {1, 16, false}, {1, 32, true}, wide}};
  if (gates != 4) return {};
  if (io_bytes == 4) return {5, 1, {turns, {1, 16, false}, {1, 16, true}, {1, 24, true}, wide}};
  return {
      7,
      2,
      {turns, {1, 32, false}, {1, 16, false}, {1, 24, true}, {1, 48, false}, wide, {2, 36, true}}};
}

// The most bytes of weights of a launch; where those of all heads are more, launches of fewer heads
// follow one another. fp32 weights that do not stay in L2 come from memory at every step, which is
// still faster than the other engines up to the largest weights that were measured.
constexpr int64_t kMostInL2 = 45'000'000;
constexpr int64_t most_weights(int io_bytes) { return io_bytes == 4 ? 70'000'000 : kMostInL2; }

struct Sizes {
  int64_t S, N, D;
  int gates, io_bytes;
  bool keeps = false;  // the cell's keeps_state
  bool saves = false;  // the forward pass saves values for a backward pass

  constexpr bool has_wide() const { return keeps && (!saves || saves_wide(io_bytes)); }
  constexpr int64_t head_bytes() const { return D * D * gates * io_bytes; }  // of the weights
  constexpr int64_t launches() const {
    const int64_t at_once = most_weights(io_bytes) / std::max<int64_t>(head_bytes(), 1);
    return std::max<int64_t>(1, divide_up(N, std::max<int64_t>(at_once, 1)));
  }
  constexpr int64_t heads_of_launch() const { return divide_up(N, launches()); }
  constexpr int64_t launch_bytes() const { return heads_of_launch() * head_bytes(); }
};

// Of a launch.
constexpr int64_t count_tiles(const Tile& tile, const Sizes& z) {
  return z.heads_of_launch() * divide_up(z.S, tile.rows()) * divide_up(z.D, tile.units);
}

// As many thread blocks as run at once, or fewer if they then have as few tiles each.
constexpr int64_t count_blocks(int64_t tiles, const Device& device) {
  return divide_up(tiles, divide_up(tiles, device.sms));
}

// What a step of a launch takes, in us: for each tile of a thread block a time per panel of the
// depth, and a time for the cells and the exchange, other ones where tiles would take turns and a
// block has one; or, of large calls, what their loads from L2 take. Between the two the longer one
// counts most.
struct Cost {
  double panel, tile, panel_alone, tile_alone;
  double bytes;  // from L2 in a us
};
// Of `tiles`, for LSTMs, GRUs and Elman cells on an H200, without values to save and with them, in
// 16 bits and in fp32: see NOTEBOOK.md, "The batch engine".
constexpr Cost kCosts16[3][2][kMostTiles] = {{{{0.199, 3.41, 0.318, 4.69, 12.7e6},
                                               {0.29, 3.79, 0.29, 3.79, 11.0e6},
                                               {0.157, 2.92, 0.157, 2.92, 10.3e6},
                                               {0.13, 1.63, 0.161, 2.72, 12.8e6},
                                               {0.473, 4.79, 0.473, 4.79, 9.4e6},
                                               {0.247, 5.04, 0.409, 5.94, 11.6e6},
                                               {0.1, 7.2, 0.364, 6.2, 12e6}},
                                              {{0.167, 5.18, 0.319, 5.46, 11.2e6},
                                               {0.286, 4.73, 0.286, 4.73, 8.0e6},
                                               {0.153, 3.51, 0.153, 3.51, 8.3e6},
                                               {0.0724, 3.33, 0.169, 3.64, 10.6e6},
                                               {0.512, 6.04, 0.512, 6.04, 7.1e6}}},
                                             {{{0.171, 3.32, 0.228, 5.68, 12.6e6},
                                               {0.22, 4.25, 0.22, 4.25, 10.4e6},
                                               {0.155, 3.14, 0.155, 3.14, 11.2e6},
                                               {0.122, 1.72, 0.17, 3.16, 11.8e6},
                                               {0.197, 4.64, 0.297, 6.99, 11.4e6}},
                                              {{0.0979, 5.57, 0.265, 6.1, 10.1e6},
                                               {0.257, 5.08, 0.257, 5.08, 7.8e6},
                                               {0.166, 3.63, 0.166, 3.63, 9.1e6},
                                               {0.102, 2.48, 0.2, 3.46, 11.6e6}}},
                                             {{{0.132, 2.5, 0.164, 3.56, 14.3e6},
                                               {0.125, 1.31, 0.141, 2.44, 15.3e6},
                                               {0.0851, 2.64, 0.164, 3.17, 11.4e6},
                                               {0.286, 4.3, 0.286, 4.3, 9.8e6}},
                                              {{0.106, 4.1, 0.17, 4.56, 11.5e6},
                                               {0.101, 1.84, 0.15, 2.75, 12.8e6},
                                               {0.0611, 3.89, 0.167, 4.17, 10.7e6},
                                               {0.383, 5.39, 0.383, 5.39, 7.0e6}}}};
constexpr Cost kCosts32[3][2][kMostTiles] = {{{{0.224, 3.86, 0.32, 5.34, 13.0e6},
                                               {0.179, 3.18, 0.179, 3.18, 11.7e6},
                                               {0.127, 1.13, 0.141, 2.3, 13.9e6},
                                               {0.149, 1.22, 0.172, 2.8, 12.1e6},
                                               {0.219, 7.3, 0.395, 7.03, 12.3e6}},
                                              {{0.174, 6.72, 0.297, 7.21, 10.5e6},
                                               {0.171, 4.14, 0.171, 4.14, 10.1e6},
                                               {0.113, 1.64, 0.139, 2.68, 13.3e6},
                                               {0.123, 2.3, 0.176, 3.27, 11.9e6},
                                               {0.256, 10.5, 0.349, 9.5, 9.4e6}}},
                                             {{{0.189, 3.67, 0.275, 5.94, 12.8e6},
                                               {0.234, 4.81, 0.234, 4.81, 10.1e6},
                                               {0.157, 3.41, 0.157, 3.41, 12.7e6},
                                               {0.12, 1.99, 0.163, 3.71, 11.8e6},
                                               {0.225, 4.75, 0.31, 7.81, 13.2e6}},
                                              {{0.155, 6.15, 0.296, 6.57, 10.3e6},
                                               {0.233, 6.45, 0.233, 6.45, 8.4e6},
                                               {0.149, 4.23, 0.149, 4.23, 10.5e6},
                                               {0.117, 2.68, 0.19, 4, 11.9e6},
                                               {0.191, 8.18, 0.315, 9.45, 9.5e6}}},
                                             {{{0.121, 3.69, 0.159, 4.24, 14.6e6},
                                               {0.139, 1.32, 0.134, 2.75, 16.3e6},
                                               {0.171, 2.28, 0.155, 3.95, 11.8e6},
                                               {0.268, 6.56, 0.268, 6.56, 11.1e6}},
                                              {{0.129, 5.07, 0.167, 5.13, 13.3e6},
                                               {0.0864, 2.42, 0.137, 3.25, 12.8e6},
                                               {0.128, 4.09, 0.152, 5, 11.4e6},
                                               {0.307, 7.79, 0.307, 7.79, 8.1e6}}}};

inline double step_us(int index, const Sizes& z, const Device& device) {
  const Tile tile = tiles(z.gates, z.io_bytes)[index];
  const Cost& cost = (z.io_bytes == 2 ? kCosts16 : kCosts32)[cost_row(z.gates)][z.saves][index];
  const double count = double(count_tiles(tile, z)), rounds = std::ceil(count / device.sms);
  const double panels = double(panels_of(z.D, z.io_bytes));
  const bool alone = tile.turns && rounds == 1;
  const double blocks = rounds * ((alone ? cost.panel_alone : cost.panel) * panels +
                                  (alone ? cost.tile_alone : cost.tile));
  const double values = double(z.S * z.heads_of_launch()) * double(z.D) * z.gates / 4;
  const double bytes =
      count * tile.stage_bytes(z.gates) * panels + (z.saves ? 17 : 10) * z.io_bytes * values;
  const auto fourth = [](double x) { return x * x * x * x; };
  return std::sqrt(std::sqrt(fourth(blocks) + fourth(bytes / cost.bytes)));
}

// The index in `tiles` of the tile that takes the least time. Tiles of 36 units are taken only
// where thread blocks keep the states of all their tiles: with more tiles they are slower than the
// others.
inline int best_tile(const Sizes& z, const Device& device) {
  int best = 0;
  for (int i = 1; i < tiles(z.gates, z.io_bytes).count_with(z.has_wide()); ++i) {
    const Tile tile = tiles(z.gates, z.io_bytes)[i];
    const bool pays =
        tile.units % 8 == 0 || count_tiles(tile, z) <= int64_t(tile.kept_tiles()) * device.sms;
    if (pays && step_us(i, z, device) < step_us(best, z, device)) best = i;
  }
  return best;
}

constexpr std::array<Limit, 3> limits(const Sizes& z, const Device& device) {
  constexpr int64_t kMostElements = (int64_t(1) << 30) - 1;  // offsets in a state fit in 32 bits
  const bool overflows = z.S * z.N > kMostElements / z.D;
  const int64_t elements = overflows ? kMostElements + 1 : z.S * z.N * z.D;
  return {{{"instructions of code for 9.0a", !device.code.sm_90a, 0, ""},
           {"a cell of 2 gates", tiles(z.gates, z.io_bytes).count == 0, 0, ""},
           {"a state", elements, kMostElements, "elements"}}};
}

// The sequences of all heads; on a GPU with fewer SMs than an H200's 132, a number that takes as
// long on the H200.
constexpr double rows_of(const Sizes& z, const Device& device) {
  return double(z.S * z.N) * 132 / double(device.sms);
}

// What a step of the other engines takes, in us, measured on an H200 with 16 to 4096 sequences and
// heads of 64 to 2048 units. The first two run the sequences in passes.
constexpr double grid_us(const Sizes& z, const Device& device) {
  const double D = double(z.D), rows = rows_of(z, device) * (z.gates == 1 ? 0.8 : 1);
  double row;
  if (z.io_bytes == 2) {
    row = D <= 256 ? 22e-6 * D : D <= 512 ? 0.0125 : D <= 768 ? 0.022 : D <= 1056 ? 0.037 : 0.15;
    return std::max(1.8, row * rows + 0.5);
  }
  row = D <= 256    ? 28e-6 * D
        : D <= 384  ? 0.0145
        : D <= 512  ? 0.019
        : D <= 640  ? 0.055
        : D <= 1056 ? 0.08
                    : 0.18;
  return std::max(2.2, row * rows + 0.5);
}
constexpr double cluster_us(const Sizes& z, const Device& device) {
  const double row = z.D <= 256 ? 12.5e-6 * double(z.D) : 0.0145;
  return std::max(1.5, row * rows_of(z, device) * (z.gates == 1 ? 0.55 : 1));
}
constexpr double kMemoryRate = 4.3e6;  // bytes in a us
constexpr double gemm_us(const Sizes& z) {
  const double sums = double(z.S * z.N) * double(z.D) * z.gates, large = sums / 1e6 - 1;
  const double product = sums * double(z.D) * 2, weights = double(z.N * z.head_bytes());
  if (z.io_bytes == 4) {
    const double least = z.gates == 4 ? 9.2 : z.gates == 3 ? 8 : 6.8;
    return std::max(least, 7.5 + weights / kMemoryRate) + product / 310e6 +
           std::max(0.0, large) * 3.8;
  }
  const double least = z.gates > 1 || z.D <= 384 ? 7 : 8.5;
  return std::max(least, 4 + weights / kMemoryRate) + product / 720e6 + std::max(0.0, large) * 3.1;
}

// Fitted to calls of 1 to 32 sequences. One sequence, and two of a cell with at most 3 gates, take
// less for every weight than more sequences do.
constexpr double step_engine_us(const Sizes& z) {
  const double weights = double(z.N * z.D * z.D * z.gates) / 1e6;
  if (z.S == 1 || (z.S == 2 && z.gates <= 3)) return 3 + 0.88 * weights;
  return 4.5 + (1.25 + 0.024 * double(z.S)) * weights;
}

// Whether this engine is faster than `other`, which runs the call otherwise, by more than the costs
// are wrong.
constexpr double kLeastStep = 3.5, kPreparation = 12;  // us
inline bool is_faster(const Sizes& z, int64_t T, Engine other, const Device& device) {
  double others;
  if (other == Engine::kGrid) {
    others = grid_us(z, device);
  } else if (other == Engine::kCluster) {
    others = cluster_us(z, device);
  } else if (other == Engine::kGemm) {
    others = gemm_us(z);
  } else if (other == Engine::kStep && z.io_bytes == 4) {
    others = step_engine_us(z);
  } else {
    return false;
  }
  const int64_t weights = z.launch_bytes();
  if (weights > most_weights(z.io_bytes)) return false;
  double us = std::max(kLeastStep, step_us(best_tile(z, device), z, device));
  if (weights > kMostInL2) us = std::max(us, double(weights) / 3.7e6);
  const double copies = 2 * double(z.N * z.head_bytes()) / kMemoryRate;
  us = us * double(z.launches()) + std::max(kPreparation, copies) / double(T);
  return us < 0.95 * others;
}

// What a launch works on. The operands are stored as their stages will lie in shared memory: for
// every head a panel for every kRowBytes of the depth, swizzled; fp32 is rounded to TF32.
struct Work {
  int D, N, unit_tiles, row_tiles;
  int panels;               // of the depth
  bool has_initial;         // whether the first step has a product
  int h_units;              // of a head that h has
  int64_t h_batch, h_time;  // strides of h
  int64_t row_capacity;     // rows of a panel of h: S rounded up to whole tiles
  int64_t operand_bytes;    // of one buffer of h
  char* weight;             // [N, unit tiles, panels, columns] rows
  char* operand;            // [2, N, panels, row_capacity] rows: h after even and after odd steps
  float* bias;              // [N, bias rows, units of all tiles]
  unsigned* published;      // [N, row tiles], counts the warpgroups that have published their tile
  int64_t bytes;            // of the buffers

  Work(const SequenceParams& p, int gates, int bias_rows, int io_bytes, const Tile& tile,
       void* scratch) {
    D = int(p.D), N = int(p.N), has_initial = false;
    unit_tiles = int(divide_up(p.D, tile.units)), row_tiles = int(divide_up(p.S, tile.rows()));
    panels = int(panels_of(p.D, io_bytes));
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
