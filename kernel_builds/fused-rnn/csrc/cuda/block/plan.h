// Sizes of the block engine's thread blocks: pure functions of the shape, used by the planner, the
// launch and the kernel.
#pragma once
#include "../engine.h"
#include "../limits.h"
#include "../tiles.h"

namespace flashcell::cuda::block {

constexpr int kTileSequences = 8;  // columns of a matrix instruction
constexpr int kVectorBytes = 16;   // bytes of a vector load

// The widest row that code for Turing runs: wider heads need more than the 64 KB of its blocks.
constexpr int kTuringRowBytes = 128;

constexpr Limit limit(int64_t D, int io_bytes, const Device& device) {
  const int most = device.code.is_turing() ? kTuringRowBytes : tiles::kBlockRowBytes;
  return {"row of the weight in registers", D * io_bytes, most, "bytes"};
}

// The width that a head's kernel is compiled for: 32, 64 or 128.
constexpr int compiled_width(int64_t D) { return D <= 32 ? 32 : D <= 64 ? 64 : 128; }

constexpr int forward_threads(int width) { return 4 * width; }   // a warp has eight units
constexpr int backward_threads(int width) { return 2 * width; }  // a warp has sixteen units

// Bytes of a row of eight sequences, each padded by a vector so that they start in different banks.
constexpr int64_t row_bytes(int64_t width, int io_bytes) {
  return (width * io_bytes + kVectorBytes) * kTileSequences;
}

// Stages of the input ring. All of the block's shared memory then fits in 99 KB, the limit of sm_86
// and sm_89, or in Turing's 64 KB, up to kTuringRowBytes.
constexpr int stages(int64_t stage_bytes, bool turing) {
  return turing                                                        ? tiles::kBlockLeastStages
         : stage_bytes * tiles::kBlockStages <= tiles::kBlockRingBytes ? tiles::kBlockStages
         : stage_bytes * tiles::kBlockFewStages <= tiles::kBlockRingBytes
             ? tiles::kBlockFewStages
             : tiles::kBlockLeastStages;
}

// Bytes of the input ring and of two steps of outputs.
constexpr int64_t ring_and_outbox_bytes(int inputs, int outputs, int64_t width, int io_bytes,
                                        bool turing) {
  const int64_t row = row_bytes(width, io_bytes);
  return stages(inputs * row, turing) * inputs * row + 2 * outputs * row;
}

// Numbers of rows of units that a step reads and writes.
constexpr int forward_inputs(const CellSizes& cell) { return cell.gates; }
// With h and h_prev.
constexpr int forward_outputs(const CellSizes& cell) { return cell.saved + 2; }
constexpr int backward_inputs(const CellSizes& cell) { return cell.saved + 1; }  // saved and dh
constexpr int backward_outputs(const CellSizes& cell) {
  return cell.splits_gradient ? 2 * cell.gates : cell.gates;  // dx, and dr if it differs
}

constexpr int64_t forward_shared_bytes(const CellSizes& cell, int width, int io_bytes,
                                       bool turing) {
  return 2 * row_bytes(width, io_bytes) + ring_and_outbox_bytes(forward_inputs(cell),
                                                                forward_outputs(cell), width,
                                                                io_bytes, turing);
}
constexpr int64_t backward_shared_bytes(const CellSizes& cell, int width, int io_bytes,
                                        bool turing) {
  return 2 * row_bytes(int64_t(cell.gates) * width, io_bytes) +
         ring_and_outbox_bytes(backward_inputs(cell), backward_outputs(cell), width, io_bytes,
                               turing);
}

}  // namespace flashcell::cuda::block
