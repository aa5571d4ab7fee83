// What a thread block of the block engine holds: pure functions of the shape, for the planner, the
// launch and the kernel.
#pragma once
#include "../engine.h"
#include "../limits.h"
#include "../tiles.h"

namespace flashcell::cuda::block {

constexpr int kTileSequences = 8;  // of a matrix instruction
constexpr int kVectorBytes = 16;   // of a load

constexpr Limit limit(int64_t D, int io_bytes) {
  return {"row of the weight in registers", D * io_bytes, tiles::kBlockRowBytes, "bytes"};
}

// The width that a head's kernel is compiled for: 32, 64 or 128.
constexpr int compiled_width(int64_t D) { return D <= 32 ? 32 : D <= 64 ? 64 : 128; }

constexpr int forward_threads(int width) { return 4 * width; }   // a warp for eight units
constexpr int backward_threads(int width) { return 2 * width; }  // a warp for sixteen

// A row of eight sequences, padded by a vector so that neighbours lie in other banks.
constexpr int64_t row_bytes(int64_t width, int io_bytes) {
  return (width * io_bytes + kVectorBytes) * kTileSequences;
}

// Steps of the input ring. With the rest they take 99 KB at most: what sm_86 and sm_89 have.
constexpr int stages(int64_t stage_bytes) {
  return stage_bytes * tiles::kBlockStages <= tiles::kBlockRingBytes ? tiles::kBlockStages
         : stage_bytes * tiles::kBlockFewStages <= tiles::kBlockRingBytes
             ? tiles::kBlockFewStages
             : tiles::kBlockLeastStages;
}

// The input ring, and two steps of outputs.
constexpr int64_t ring_and_outbox_bytes(int inputs, int outputs, int64_t width, int io_bytes) {
  const int64_t row = row_bytes(width, io_bytes);
  return stages(inputs * row) * inputs * row + 2 * outputs * row;
}

// Rows of units that a step reads and writes.
constexpr int forward_inputs(const CellSizes& cell) { return cell.gates; }
constexpr int forward_outputs(const CellSizes& cell) { return cell.saved + 2; }  // h, h_prev
constexpr int backward_inputs(const CellSizes& cell) { return cell.saved + 1; }  // dh
constexpr int backward_outputs(const CellSizes& cell) {
  return cell.splits_gradient ? 2 * cell.gates : cell.gates;  // dx, and dr
}

constexpr int64_t forward_shared_bytes(const CellSizes& cell, int width, int io_bytes) {
  return 2 * row_bytes(width, io_bytes) +
         ring_and_outbox_bytes(forward_inputs(cell), forward_outputs(cell), width, io_bytes);
}
constexpr int64_t backward_shared_bytes(const CellSizes& cell, int width, int io_bytes) {
  return 2 * row_bytes(int64_t(cell.gates) * width, io_bytes) +
         ring_and_outbox_bytes(backward_inputs(cell), backward_outputs(cell), width, io_bytes);
}

}  // namespace flashcell::cuda::block
