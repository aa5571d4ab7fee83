// Decides which heads the fma engine runs, and with which sizes: pure functions of the shape, used
// by the planner and the launch.
#pragma once
#include <algorithm>

#include "../engine.h"
#include "../limits.h"

namespace flashcell::cuda::fma {

constexpr int kWidest = 256;

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int round_up(int64_t a, int64_t b) { return int((a + b - 1) / b * b); }

// The width that a head's kernel is compiled for.
constexpr int compiled_width(int64_t D) {
  return D <= 32 ? 32 : D <= 64 ? 64 : D <= 96 ? 96 : D <= 128 ? 128 : 256;
}

// The most units of a thread block. 4 x 96 x 96 weights take 144 KB of an SM's 256 KB of registers;
// wider heads are divided among the blocks of a cluster.
constexpr int most_units(int gates, int width) {
  return gates == 1 ? (width < 128 ? width : 128) : width <= 96 ? width : width == 128 ? 64 : 32;
}
// Blocks that an SM can hold at once.
constexpr int resident(int width) { return width == 32 ? 4 : width == 64 ? 2 : 1; }
constexpr bool uses_cluster(int gates, int width) { return most_units(gates, width) < width; }
constexpr int members(int gates, int64_t D) {
  return int(divide_up(D, most_units(gates, compiled_width(D))));
}
// Units of a thread block. The last block of a cluster may have fewer.
constexpr int units(int gates, int64_t D) { return round_up(divide_up(D, members(gates, D)), 4); }

// How the product is divided among the threads. `lanes` neighbouring lanes compute the same `units`
// units. Each holds every lanes-th vector of four weights along the depth. With a vector of four
// elements of the operand a lane does 4 * units * values multiplications (values: products per
// unit). A vector load costs as much as 16 multiplications, so units * values is 4 if possible.
struct Division {
  int values, units, lanes, depth;

  constexpr int chunks() const { return int(divide_up(depth, 4 * lanes)); }
  constexpr int threads(int64_t D) const {
    return round_up(int64_t(divide_up(D, units)) * lanes, 32);
  }
};
constexpr Division forward_division(int gates, int width) {
  if (gates == 1) return Division{1, 4, 8, width};
  return Division{gates, 1, width <= 128 ? 4 : 8, width};
}
// A block multiplies the gradients of its own units. In a cluster that gives a part of the sum for
// every unit of the head.
constexpr Division backward_division(int gates, int width) {
  const int depth = gates * most_units(gates, width);
  if (uses_cluster(gates, width)) return Division{1, 4, width == 128 ? 8 : 4, depth};
  return Division{1, 4, gates == 1 ? 8 : 16, depth};
}

// Sequences whose products a lane computes at the same time: 1, 2 or 4. A tile of more sequences
// takes them four at a time, in passes. To keep the library small, 2 is compiled only for cells of
// one gate and for a GRU of 97 to 128 units, where a step of four sequences takes more than twice
// as long as a step of one, and only for Hopper and later GPUs.
constexpr int together(int tile) { return std::min(tile, 4); }
constexpr bool takes_two(int gates, int width) {
  return gates == 1 ? width >= 128 : gates == 3 && width == 128;
}

// Stages of the input ring: a step of one sequence is shorter than the latency of memory.
constexpr int stages(int together) { return together == 1 ? 8 : 4; }

// Where the parts of a thread block's shared memory lie, in floats.
struct Memory {
  int tile, members, units;  // sequences, blocks of a cluster, units of a block
  int row, sequence;         // distances of the operands and of the inputs of two sequences
  int marks, barriers, operand, inbox, states, ring, floats;

  static constexpr int kPlaceFloats = 10;

  constexpr int64_t bytes() const { return int64_t(floats) * 4; }
};

// `operands` is the number of copies of the operand, `inputs` the number of rows of units that a
// step of a sequence reads, `states` that of the states in shared memory, of a block and sequence.
constexpr Memory memory(const Division& d, int64_t D, int gates, int tile, int operands, int inbox,
                        int inputs, int states) {
  Memory m{};
  m.tile = tile, m.members = members(gates, D), m.units = units(gates, D);
  // Lanes of a warp read vectors of different sequences. These distances avoid bank conflicts.
  m.row = round_up(d.chunks() * 4 * d.lanes, 32) + (d.lanes == 4 ? 8 : 0);
  m.sequence = round_up(inputs * m.units, 32) + 8;
  m.marks = tile * Memory::kPlaceFloats;
  m.barriers = round_up(m.marks + 4 * tile, 4);
  m.operand = m.barriers + 4;  // after two mbarriers
  m.inbox = m.operand + operands * tile * m.row;
  m.states = m.inbox + inbox * tile * m.units;
  m.ring = m.states + tile * states;
  m.floats = m.ring + stages(together(tile)) * tile * m.sequence;
  return m;
}

// Cells that a thread owns in every pass when lanes keep the cells whose sums they have.
constexpr int owned(const Division& d, int together) {
  const int items = together * d.units;
  return items > d.lanes ? items / d.lanes : 1;
}

constexpr Memory forward_memory(const CellSizes& cell, int64_t D, int tile) {
  const Division d = forward_division(cell.gates, compiled_width(D));
  const int sequences = together(tile);
  const int cells = owned(d, sequences) * d.threads(units(cell.gates, D));
  const int states = int(divide_up(cells * (cell.states - 1), sequences));
  return memory(d, D, cell.gates, tile, 2, 0, cell.gates, states);
}
constexpr Memory backward_memory(const CellSizes& cell, int64_t D, int tile) {
  const Division d = backward_division(cell.gates, compiled_width(D));
  const int sequences = together(tile), inputs = cell.saved + 1;
  if (uses_cluster(cell.gates, compiled_width(D))) {
    const int states = cell.states * most_units(cell.gates, compiled_width(D));
    return memory(d, D, cell.gates, tile, 1, 2 * members(cell.gates, D), inputs, states);
  }
  const int cells = owned(d, sequences) * d.threads(D);
  const int states = int(divide_up(cells * cell.states, sequences));
  return memory(d, D, cell.gates, tile, 2, 0, inputs, states);
}

constexpr bool has_clusters(const Device& device) { return device.code.arch >= 90; }

constexpr std::array<Limit, 3> limits(int64_t D, int gates, int io_bytes, const Device& device) {
  return {{{"16-bit elements", io_bytes == 2, 0, ""},
           {"width of a head in fp32 registers", D, kWidest, "units"},
           {"thread blocks of a cluster", members(gates, std::min<int64_t>(D, kWidest)),
            has_clusters(device) ? 8 : 1, "blocks"}}};
}

// The number of thread blocks, or of clusters with one block per SM, that run at once. A cluster
// stays within one part of the GPU (a GPC) of 16 to 18 SMs, which lie in pairs.
constexpr int64_t at_once(int64_t D, int gates, const Device& device) {
  const int count = members(gates, D);
  if (count == 1) return device.sms * resident(compiled_width(D));
  return count == 2 ? device.sms / 2 : device.sms / 18 * (16 / count);
}

// The most sequences of a block for which shared memory suffices: one, or a multiple of four (two
// need less). It is sized for an slstm, which needs most: 4 states and 7 saved values.
constexpr int most_sequences(int64_t D, int gates, const Device& device) {
  const CellSizes largest{gates, 4, gates + 1, 7, true, true};
  int most = 16;
  while (most > 1 && (backward_memory(largest, D, most).bytes() > device.shared_bytes ||
                      forward_memory(largest, D, most).bytes() > device.shared_bytes)) {
    most = most > 4 ? most - 4 : 1;
  }
  return most;
}

// Sequences of a block: one or two while all blocks run at once, else as many fours as it takes. A
// step of an lstm of 64 units takes 0.5 us for one sequence, 1.0 for four and 1.8 for eight (H100).
constexpr int tile(int64_t S, int64_t N, int64_t D, int gates, const Device& device) {
  const int64_t together = at_once(D, gates, device);
  const int most = most_sequences(D, gates, device);
  if (S * N <= together || most == 1) return 1;
  const bool two = has_clusters(device) && takes_two(gates, compiled_width(D));
  if (two && N * divide_up(S, 2) <= together) return 2;
  int tile = 4;
  while (tile < most && N * divide_up(S, tile) > together) tile += 4;
  return tile;
}

// Whether this engine is faster than `other`, the engine with matrix instructions (or step, for
// exact fp32) that runs the call otherwise. In tf32 it is faster than the grid engine while each
// cluster runs one sequence: a step of a gru of 128 units takes 0.7 us instead of 1.2, of an lstm
// 0.95 instead of 1.2, with four sequences 1.45 and 1.65. Up to 64 units it is faster for a gru
// alone, while each thread block has an SM: 0.36 and 0.52 us for 16 and 64 units, in the block
// engine 0.46 and 0.63; of an lstm both take 0.58, and of an slstm it takes 0.65 instead of 0.56
// (H200).
constexpr bool is_faster(int64_t S, int64_t N, int64_t D, int gates, Engine other,
                         const Device& device) {
  if (other == Engine::kBlock) return gates == 3 && S * N <= device.sms;
  if (other != Engine::kGrid) return other == Engine::kStep;
  return members(gates, D) == 1 || S * N <= at_once(D, gates, device);
}

}  // namespace flashcell::cuda::fma
