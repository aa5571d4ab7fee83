// The loads of a Hopper block's producer for 128 rows of an output (row_block.cuh): the rows' own
// left operand, which stays in shared memory for all products, and, through the ring, a state and
// the rows of tiles.
#pragma once
#include "../chunk/loads.cuh"
#include "../chunk/ring.cuh"

namespace flashcell::cuda {

constexpr int kBlockRows = 2 * kTile, kBlockColumns = 128;
// A slot holds two tiles of 64 rows of one panel each, or one tile of 128 rows.
constexpr int kGranule = kTile * kPanelBytes, kSlotBytes = 2 * kGranule;
constexpr int kMostPanels = 8;  // most panels of left rows, which stay for the whole block
using BlockRing = Ring<kSlotBytes>;

struct RowBlock {
  int row, column;  // first row and column of the output
  int panels;       // panels of the depth of left, state and right
  int first, end;   // tiles of `right` and `inner`
  bool has_state;
};
template <typename IO>
struct RowInputs {
  Matrix<IO> left, state, right, inner;
};

// The left rows, one slot for each panel. Every block uses all slots once, so that their barriers
// advance together; slots beyond its panels are not written.
struct LeftRows {
  uint32_t memory, barriers;
  int count, round = 0;  // panels, and blocks handled so far

  DEVICE uint32_t address(int panel) const { return memory + panel * kSlotBytes; }
  DEVICE Slot slot(int panel) const { return {barriers + panel * Slot::kBytes}; }
};

// The state of a producer thread.
template <typename IO>
struct BlockProducer {
  BlockRing ring;
  LeftRows left;

  // Whether the second tile of a slot is below the first in the matrix, or beside it.
  enum class Second { kBelow, kBeside };

  // Copies a slot's two tiles. Few instructions matter here: a copying warp has no other work that
  // would hide its latency.
  template <Second kSecond>
  DEVICE static void copy(uint32_t to, const Matrix<IO>& from, int row, int column) {
    constexpr bool kBelow = kSecond == Second::kBelow;
    constexpr int kAtOnce = kWarpgroup / 8, kTimes = kTile / kAtOnce;  // rows
    const int piece = threadIdx.x % 8, first = threadIdx.x / 8;
    const bool whole = row + (kBelow ? 2 : 1) * kTile <= from.rows &&
                       column + (kBelow ? 1 : 2) * kPanel<IO> <= from.columns;
    to += first * kPanelBytes + (piece ^ first % 8) * 16;
    row += first, column += 8 * piece;
    const IO* source = from.data + row * from.stride + column;
    const int64_t step = kAtOnce * from.stride;
    if (whole) {
#pragma unroll
      for (int i = 0; i < 2 * kTimes; ++i) {
        const bool second = !kBelow && i >= kTimes;
        copy_async(to + i * kAtOnce * kPanelBytes, source + (second ? kPanel<IO> : 0));
        source += !kBelow && i == kTimes - 1 ? -(kTimes - 1) * step : step;
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < 2 * kTimes; ++i) {
      const int r = row + (kBelow ? i : i % kTimes) * kAtOnce;
      const int c = column + (kBelow ? 0 : i / kTimes * kPanel<IO>);
      const bool exists = r < from.rows && c < from.columns;
      const IO* at = from.data + r * from.stride + c;
      copy_async_or_zero(to + i * kAtOnce * kPanelBytes, exists ? at : from.data, exists);
    }
  }
  template <Second kSecond>
  DEVICE void fill_slot(const Matrix<IO>& from, int row, int column) {
    ring.slot().wait_empty(ring.round);
    copy<kSecond>(ring.address(), from, row, column);
    ring.slot().fill();
    ring.advance();
  }
  // Fills slots [first, end) of the state: for every panel of depth, its column blocks in order.
  template <Major kState>
  DEVICE void fill_state(const RowBlock& block, const Matrix<IO>& from, int column_blocks,
                         int first, int end) {
    for (int i = first; i < end; ++i) {
      const int depth = i / column_blocks * kPanel<IO>;
      const int column = block.column + i % column_blocks * kBlockColumns;
      if constexpr (kState == Major::kDepth) {
        fill_slot<Second::kBelow>(from, column, depth);
      } else {
        fill_slot<Second::kBeside>(from, depth, column);
      }
    }
  }
  // Loads what the consumers multiply, in their order. As many slots of the state as the ring holds
  // are loaded first, while consumers still use the left rows of the block before. also() copies
  // what must land with the first panel.
  template <Major kState, int kBlocks, typename Also>
  DEVICE void fill(const RowBlock& block, const RowInputs<IO>& from, const Also& also) {
    const int states = block.has_state ? block.panels * kBlocks : 0;
    const int ahead = states < ring.count ? states : ring.count;
    fill_state<kState>(block, from.state, kBlocks, 0, ahead);
    left.slot(0).wait_empty(left.round);
    also();
    for (int panel = 0; panel < left.count; ++panel) {
      left.slot(panel).wait_empty(left.round);
      if (panel < block.panels) {
        copy<Second::kBelow>(left.address(panel), from.left, block.row, panel * kPanel<IO>);
      }
      left.slot(panel).fill();
    }
    fill_state<kState>(block, from.state, kBlocks, ahead, states);
    for (int tile = block.first; tile < block.end; ++tile) {
      for (int panel = 0; panel < block.panels; panel += 2) {
        fill_slot<Second::kBeside>(from.right, tile * kTile, panel * kPanel<IO>);
      }
      for (int c = 0; c < kBlocks; ++c) {
        fill_slot<Second::kBeside>(from.inner, tile * kTile, block.column + c * kBlockColumns);
      }
    }
    ++left.round;
  }
};

}  // namespace flashcell::cuda
