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
#include "costs.h"

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
  int64_t I = 0;       // the width of a layer's input that the engine multiplies

  constexpr bool has_wide() const { return keeps && (!saves || saves_wide(io_bytes)); }
  constexpr int64_t panels() const { return panels_of(D, io_bytes) + panels_of(I, io_bytes); }
  constexpr int64_t head_bytes() const { return D * (D + I) * gates * io_bytes; }  // of the weights
  constexpr int64_t launches() const {
    const int64_t at_once = most_weights(io_bytes) / std::max<int64_t>(head_bytes(), 1);
    return std::max<int64_t>(1, divide_up(N, std::max<int64_t>(at_once, 1)));
  }
  constexpr int64_t heads_of_launch() const { return divide_up(N, launches()); }
  constexpr int64_t launch_bytes() const { return heads_of_launch() * head_bytes(); }
};

// The tiles of a launch.
constexpr int64_t count_tiles(const Tile& tile, const Sizes& z) {
  return z.heads_of_launch() * divide_up(z.S, tile.rows()) * divide_up(z.D, tile.units);
}

// As many thread blocks as run at once, or fewer if they then have as few tiles each.
constexpr int64_t count_blocks(int64_t tiles, const Device& device) {
  return divide_up(tiles, divide_up(tiles, device.sms));
}

inline double step_us(int index, const Sizes& z, const Device& device) {
  const Tile tile = tiles(z.gates, z.io_bytes)[index];
  const auto& of_dtype =
      z.io_bytes == 2 ? (z.I > 0 ? kInputCosts16 : kCosts16) : (z.I > 0 ? kInputCosts32 : kCosts32);
  const Cost& cost = of_dtype[cost_row(z.gates)][z.saves][index];
  const double count = double(count_tiles(tile, z)), rounds = std::ceil(count / device.sms);
  const double panels = double(z.panels());
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

// The sequences of all heads. For a GPU with other than an H200's 132 SMs it is the number that
// takes as long on an H200.
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

constexpr double kUnknown = 1e30;

// What a step of `other` takes, which would run the call otherwise; 0 if that is not known.
constexpr double other_us(const Sizes& z, Engine other, const Device& device) {
  if (other == Engine::kGrid) return grid_us(z, device);
  if (other == Engine::kCluster) return cluster_us(z, device);
  if (other == Engine::kGemm) return gemm_us(z);
  return other == Engine::kStep && z.io_bytes == 4 ? step_engine_us(z) : 0;
}

// What a step of this engine takes, with its share of what comes before the first one.
constexpr double kLeastStep = 3.5, kPreparation = 12;  // us
inline double call_us(const Sizes& z, int64_t T, const Device& device) {
  const int64_t weights = z.launch_bytes();
  if (weights > most_weights(z.io_bytes)) return kUnknown;
  double us = std::max(kLeastStep, step_us(best_tile(z, device), z, device));
  if (weights > kMostInL2) us = std::max(us, double(weights) / 3.7e6);
  const double inputs = 2 * double(z.S * z.I * z.io_bytes) / kMemoryRate;
  const double copies = 2 * double(z.N * z.head_bytes()) / kMemoryRate;
  return us * double(z.launches()) + inputs + std::max(kPreparation, copies) / double(T);
}

// Whether this engine is faster than `other` by more than the error of the estimates.
inline bool is_faster(const Sizes& z, int64_t T, Engine other, const Device& device) {
  return call_us(z, T, device) < 0.95 * other_us(z, other, device);
}

// What the product of a layer's input of I units takes on its own, in us for each step.
constexpr double product_us(const Sizes& z, int64_t I) {
  const double gates = double(z.S) * double(z.D) * z.gates;
  const double rate = z.io_bytes == 2 ? kProductRate16 : kProductRate32;
  return 2 * gates * double(I) / rate + kProductCopies * gates * z.io_bytes / kMemoryRate;
}

// Whether it is faster to multiply the input here than before a recurrence on this engine, or on
// `other`. The launches of the separate product count only if this engine runs the recurrence in
// either case: if they always counted, short calls of few sequences would leave faster engines.
inline bool multiplies_input(Sizes z, int64_t I, int64_t T, Engine other, const Device& device) {
  I = panels_of(I, z.io_bytes) * depth_of_panel(z.io_bytes);  // as wide as with padded units
  const double own = call_us(z, T, device) + kProductCall / double(T);
  const double elsewhere = other_us(z, other, device);
  const double before = elsewhere == 0 || own < elsewhere ? own : elsewhere;
  const double apart = before + product_us(z, I);
  z.I = I;
  return call_us(z, T, device) < 0.97 * apart;
}

// What a launch works on. The operands are stored as their stages will lie in shared memory: for
// every head a panel for every kRowBytes of the depth, swizzled; fp32 is rounded to TF32.
struct Work {
  int D, N, unit_tiles, row_tiles;
  int panels;               // of the depth
  int input_panels;         // of the layer's input, or 0 if x is given
  int all_panels;           // of both
  bool has_initial;         // whether the first step reads an h
  int h_units;              // of a head that h has
  int64_t h_batch, h_time;  // strides of h
  int64_t row_capacity;     // rows of a panel of h: S rounded up to whole tiles
  int64_t operand_bytes;    // of one buffer of h
  char* weight;             // [N, unit tiles, all panels, columns] rows
  char* operand;            // [2, N, panels, row_capacity] rows: h after even and after odd steps
  char* input;              // [T, input panels, row_capacity] rows
  float* bias;              // [N, bias rows, units of all tiles]
  unsigned* published;      // [N, row tiles], counts the warpgroups that have published their tile
  int64_t bytes;            // of the buffers

  Work(const ForwardParams& p, int gates, int bias_rows, int io_bytes, const Tile& tile,
       void* scratch) {
    D = int(p.D), N = int(p.N), has_initial = false;
    unit_tiles = int(divide_up(p.D, tile.units)), row_tiles = int(divide_up(p.S, tile.rows()));
    panels = int(panels_of(p.D, io_bytes)), input_panels = int(panels_of(p.input.I, io_bytes));
    all_panels = input_panels + panels;
    row_capacity = int64_t(row_tiles) * tile.rows();
    operand_bytes = int64_t(N) * panels * row_capacity * kRowBytes;
    const auto next = [](int64_t size) { return (size + 255) / 256 * 256; };
    char* const start = static_cast<char*>(scratch);
    const int64_t units = int64_t(unit_tiles) * tile.units;
    weight = start;
    operand = weight + N * units * all_panels * gates * kRowBytes;
    input = operand + 2 * operand_bytes;
    bias = reinterpret_cast<float*>(input + p.T * input_panels * row_capacity * kRowBytes);
    const int64_t biases = N * bias_rows * units * int64_t(sizeof(float));
    published = reinterpret_cast<unsigned*>(reinterpret_cast<char*>(bias) + next(biases));
    bytes = reinterpret_cast<char*>(published + int64_t(N) * row_tiles) - start;
  }
};

inline int64_t scratch_bytes(const ForwardParams& p, const CellSizes& cell, int io_bytes,
                             const Device& device) {
  const auto bytes = [&](bool saves) {
    const Sizes sizes{p.S, p.N, p.D, cell.gates, io_bytes, keeps_state(cell), saves, p.input.I};
    const Tile tile = tiles(cell.gates, io_bytes)[best_tile(sizes, device)];
    return Work(p, cell.gates, cell.bias_rows, io_bytes, tile, nullptr).bytes;
  };
  return std::max(bytes(false), bytes(true));
}

}  // namespace flashcell::cuda::batch
