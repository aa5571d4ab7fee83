// Decides which heads the cluster engine runs, and with which sizes: pure functions of the shape,
// used by the planner and the launch.
#pragma once
#include "../block/plan.h"
#include "../engine.h"
#include "../limits.h"

namespace flashcell::cuda::cluster {

constexpr int kUnits = 32;     // units of a thread block
constexpr int kCellWarps = 4;  // warps that run the cell, 8 units each

constexpr int64_t members(int64_t D) { return (D + kUnits - 1) / kUnits; }

constexpr bool has_code(const Device& device) { return device.code.arch >= 90; }

// Largest cluster: eight blocks on every GPU with clusters, sixteen on GPUs known to allow it.
constexpr int most_members(const Device& device) {
  return !has_code(device) ? 0 : device.arch < 120 ? 16 : 8;
}

constexpr std::array<Limit, 2> limits(int64_t D, int io_bytes, const Device& device) {
  return {{{"bytes of an element", io_bytes, 2, "bytes"},
           {"thread blocks of a cluster", members(D), most_members(device), "blocks"}}};
}

constexpr bool fits(int64_t D, int io_bytes, const Device& device) {
  return D % 8 == 0 && all_hold(limits(D, io_bytes, device));
}

// The number of clusters that run at once with one block per SM. A cluster stays within one part of
// the GPU (a GPC) of 16 to 18 SMs: an H200 runs 7 clusters of 16, or 15 of 8.
constexpr int64_t at_once(int64_t D, const Device& device) {
  return device.sms / 18 * (16 / members(D));
}

// Sequences of a cluster. With four, half of the matrix instruction's columns stay empty, but a
// step sends half as much, and a lane runs one cell instead of two: an lstm of 3 heads x 256 with
// 16 sequences takes 0.43 and 0.72 ms, with eight 0.50 and 0.84.
constexpr int tile(int64_t S, int64_t N, int64_t D, const Device& device) {
  const int64_t by_four = N * ((S + 3) / 4), by_eight = N * ((S + 7) / 8);
  return by_four <= at_once(D, device) || by_four == by_eight ? 4 : 8;
}

// Up to 256 units it is faster than the grid engine for every batch (lstm of 3 heads x 256, forward
// + backward in ms: 16 sequences 0.43 + 0.72, grid 1.23 + 1.77; 64 sequences 0.80 + 1.08, grid 3.21
// + 3.64). Wider heads take all registers of an SM and most SMs of their GPC, and are faster only
// while all clusters run at once (1 x 512: 16 sequences 0.71 + 1.02, grid 1.40 + 1.73; 64
// sequences, which are eight clusters, 1.65 + 3.14, grid 1.90 + 1.84).
constexpr Limit limit_of_speed(int64_t S, int64_t N, int64_t D, const Device& device) {
  return {"clusters at once", D <= 256 ? 0 : N * ((S + 7) / 8), at_once(D, device), "clusters"};
}
constexpr bool is_fastest(int64_t S, int64_t N, int64_t D, const Device& device) {
  return limit_of_speed(S, N, D, device).holds();
}

constexpr int compiled_depth(int64_t D) { return D <= 256 ? 256 : 512; }

// Shared memory of a thread block: the exchanged data, the input ring and the outputs.
constexpr int64_t forward_shared_bytes(const CellSizes& cell, int64_t D, int tile) {
  const int64_t depth = compiled_depth(D);
  const int64_t partials = depth > 256 ? kCellWarps * ((cell.gates + 1) / 2) * 32 * 16 : 0;
  return 2 * depth * tile * 2 + partials + 16 +
         block::ring_and_outbox_bytes(block::forward_inputs(cell), block::forward_outputs(cell),
                                      kUnits, 2, false);
}
constexpr int64_t backward_shared_bytes(const CellSizes& cell, int64_t D, int tile) {
  const int64_t inbox = 2 * compiled_depth(D) * tile * 4, operand = 2 * cell.gates * kUnits * 16;
  return inbox + operand + 16 +
         block::ring_and_outbox_bytes(block::backward_inputs(cell), block::backward_outputs(cell),
                                      kUnits, 2, false);
}

}  // namespace flashcell::cuda::cluster
