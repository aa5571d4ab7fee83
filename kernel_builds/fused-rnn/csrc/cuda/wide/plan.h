// Decides which heads the wide engine runs, and with which sizes: pure functions of the shape, used
// by the planner and the launch.
#pragma once
#include <algorithm>

#include "../fma/plan.h"

namespace flashcell::cuda::wide {

using fma::divide_up, fma::round_up;

constexpr int kThreads = 384, kWarps = kThreads / 32;
constexpr int kLane = 4, kChunk = 32 * kLane;  // elements of the depth that a lane, a warp reads
constexpr int kMostPiece = kThreads * kLane;   // elements of a sequence that are staged at once
// The same where a part of the weight streams in and a pass has eight sequences, which leaves more
// room for the weight.
constexpr int kStreamedPiece = 1024;
constexpr int64_t kMostStreamed = 50'000'000;  // bytes of all thread blocks; the L2 cache has 50 MB
constexpr int kMostTile = 64;                  // sequences of a thread block

// The product of a thread block: `rows` rows of `depth` elements. A task is a few of the rows; a
// warp computes a task for a slice of the depth.
struct Product {
  int rows, depth, tasks, slices;
};
constexpr int kMostRows = 4;  // of a task
constexpr int forward_rows(int gates) { return gates == 3 ? 3 : kMostRows; }
constexpr Product product_of(int rows, int64_t depth, int task_rows) {
  const int tasks = int(divide_up(rows, task_rows));
  const int64_t chunks = divide_up(std::min<int64_t>(depth, kMostPiece), kChunk);
  return {rows, int(depth), tasks, int(std::clamp<int64_t>(kWarps / tasks, 1, chunks))};
}
constexpr Product forward_product(int gates, int64_t D, int units) {
  return product_of(gates * units, D, forward_rows(gates));
}
constexpr Product backward_product(int gates, int64_t D, int units) {
  return product_of(units, gates * D, kMostRows);
}

// Sequences whose products are computed at the same time: of those that a kernel is compiled for,
// as few as hold a tile of so many sequences. A larger tile takes several passes.
constexpr int pass_of(int tile) { return tile <= 2 ? 2 : tile <= 4 ? 4 : 8; }

// Where the parts of a thread block's shared memory lie, in floats. The base describes the places
// and marks of the sequences.
struct Memory : fma::Memory {
  Product product;
  int pass, piece;    // sequences of a pass, and the elements of the depth that are staged at once
  int held;           // elements of every row of the weight in shared memory, the rest streams in
  int groups, heads;  // groups of thread blocks for each head, and heads of a launch
  int weights, stage, partial, sources;

  constexpr bool streams() const { return held < product.depth; }
};

constexpr int round_down(int64_t a, int b) { return int(std::max<int64_t>(a, 0) / b * b); }

// Returns the layout. Where the weight leaves no room for at least two chunks of the operand, a
// part of each row stays in global memory, and comes from the L2 cache at every step; `held` is 0
// if all of it would.
constexpr Memory memory(const Product& product, const CellSizes& cell, int units, int tile,
                        int64_t shared_bytes) {
  Memory m{};
  m.tile = tile, m.units = units, m.product = product, m.pass = pass_of(tile);
  m.marks = tile * fma::Memory::kPlaceFloats;
  m.sources = round_up(m.marks + 4 * tile, 4);
  m.states = m.sources + round_up(4 * 2 * tile, 4);
  m.partial = m.states + round_up(int64_t(tile) * units * cell.states, 4);
  const int sums = product.slices * product.tasks * kMostRows * m.pass;
  const int biases = cell.bias_rows * units * m.pass;  // the backward pass adds them up there
  m.weights = m.partial + round_up(std::max(sums, biases), 4);
  const int64_t room = shared_bytes / 4 - m.weights;
  const int whole = std::min(kMostPiece, round_up(product.depth, kChunk));
  m.held = product.depth;
  m.piece = std::min(whole, round_down((room - product.rows * product.depth) / m.pass, kChunk));
  if (m.piece < std::min(2 * kChunk, whole)) {
    m.piece = std::min(whole, m.pass <= 4 ? kMostPiece : kStreamedPiece);
    m.held = round_down((room - m.pass * m.piece) / product.rows, kChunk);
  }
  m.stage = m.weights + product.rows * m.held;
  m.floats = m.stage + m.pass * m.piece;
  return m;
}

struct Sizes {
  int64_t S, N, D;
  int gates;
};

// How the heads and sequences of a call are divided among the thread blocks.
struct Partition {
  int heads = 0, groups, members, units, tile;  // no heads: the engine cannot run the call
  double streamed;                              // the share of the weight that streams in
};

// Of all cells an slstm needs most shared memory.
constexpr CellSizes largest_cell(int gates) { return {gates, 4, gates + 1, 7, true, true}; }

constexpr Partition divide(const Sizes& z, int heads, int groups, const Device& device) {
  const int64_t blocks = device.sms / (int64_t(heads) * groups);
  if (blocks == 0) return {};
  const int units = int(divide_up(z.D, blocks)), tile = int(divide_up(z.S, groups));
  const CellSizes cell = largest_cell(z.gates);
  if (tile > kMostTile || units * pass_of(tile) > kThreads) return {};
  double share = 0;
  for (const Product& product :
       {forward_product(z.gates, z.D, units), backward_product(z.gates, z.D, units)}) {
    const Memory m = memory(product, cell, units, tile, device.shared_bytes);
    const int64_t streamed = int64_t(product.depth - m.held) * product.rows * 4 * blocks;
    const bool one = heads == 1 && groups == 1;  // else no streaming and one task a warp
    if (m.held == 0 || streamed > (one ? kMostStreamed : 0)) return {};
    if (!one && product.tasks > kWarps) return {};
    share = std::max(share, 1 - double(m.held) / product.depth);
  }
  return {heads, int(divide_up(z.S, tile)), int(divide_up(z.D, units)), units, tile, share};
}

// As many heads at once as fit, and then as many groups as leave each of them a pass of sequences.
constexpr Partition partition(const Sizes& z, const Device& device) {
  const int most_units = kWarps * (z.gates == 1 ? kMostRows : 1);  // of a block: a warp has a task
  const int64_t most_groups =                                      // of all heads
      std::max<int64_t>(1, device.sms / divide_up(z.D, most_units));
  for (int heads = int(std::min(z.N, most_groups)); heads > 0; --heads) {
    Partition best = {};
    int groups = int(std::min(divide_up(z.S, pass_of(kMostTile)), most_groups));
    for (; groups > 0 && best.heads == 0; --groups) {
      best = divide(z, heads, groups, device);
    }
    if (best.heads > 0) return best;
  }
  return {};
}

// Bytes of the transposed weight. The backward pass reads from it the part that streams in.
constexpr int64_t transposed_bytes(const Sizes& z, const CellSizes& cell, const Device& device) {
  const Partition p = partition(z, device);
  const Product product = backward_product(z.gates, z.D, p.units);
  const bool streams = memory(product, cell, p.units, p.tile, device.shared_bytes).streams();
  return streams ? z.N * z.gates * z.D * z.D * 4 : 0;
}

// Compiled for 9.0a alone, to keep the library small.
constexpr bool has_code(const Device& device) { return device.code.sm_90a; }

constexpr bool can_run(const Sizes& z, int io_bytes, const Device& device) {
  return io_bytes == 4 && z.D > fma::kWidest && z.S > 0 && has_code(device) &&
         partition(z, device).heads > 0;
}

// By how much a step of this engine is faster than one of the step or the gemm engine, as the
// logarithm of the ratio of their times: `first`, less `weights` for every 1000 weights that a
// thread block multiplies, in all passes, and `pass` for every pass. Weights that stream in count
// twice.
struct Gain {
  double first, weights, pass;
};
// Forward and backward, of cells with 4, 3 and 1 gates: fitted to 291 random modules of 257 to 2500
// units and 1 to 97 sequences on an H200 (NOTEBOOK.md, "The wide engine").
constexpr Gain kGains[2][3] = {{{0.69, 0.0014, 0.12}, {0.54, 0.0011, 0.11}, {0.91, 0.0006, 0.29}},
                               {{0.88, 0.0026, 0.17}, {0.91, 0.0025, 0.18}, {0.99, 0, 0.35}}};
// Fewer steps do not pay for bringing the weight to shared memory, and for transposing it.
constexpr int64_t kLeastSteps = 8, kLeastStreamedSteps = 16;
constexpr int64_t kMostSequences = 100;  // more were not measured
// Layers of many sequences can run side by side on the gemm engine (stack/plan.h), which takes 0.6
// of its time for each; so there the gain has to be larger.
constexpr int64_t kManySequences = 32;
constexpr double kGainOfMany = 0.4;

// What a call must keep to, so that this engine can be the fastest.
constexpr std::array<Limit, 4> limits(const Sizes& z, int64_t T, const Device& device) {
  const Partition p = partition(z, device);
  const int64_t least = p.streamed > 0 ? kLeastStreamedSteps : kLeastSteps;
  return {{{"code for other archs than 9.0a", !has_code(device), 0, ""},
           {"weights and sequences that the thread blocks do not hold", p.heads == 0, 0, ""},
           {"sequences of exact fp32", z.S, kMostSequences, "sequences"},
           {"steps too few for exact fp32", std::max<int64_t>(least - T, 0), 0, "steps"}}};
}

constexpr bool is_faster(const Sizes& z, int64_t T, bool backward, const Device& device) {
  if (!all_hold(limits(z, T, device))) return false;
  const Partition p = partition(z, device);
  const double passes = double(divide_up(p.tile, pass_of(p.tile)) * divide_up(z.N, p.heads));
  const double held = passes * p.units * z.gates * double(z.D) / 1000;
  const double weights = held * (1 + p.streamed);
  const Gain& gain = kGains[backward][cost_row(z.gates)];
  const double least = z.S > kManySequences && z.gates > 1 ? kGainOfMany : 0;
  return gain.first - gain.weights * weights - gain.pass * passes > least;
}

}  // namespace flashcell::cuda::wide
