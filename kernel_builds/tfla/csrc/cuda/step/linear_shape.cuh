// The shapes of linear.cuh: tiles of a matrix, the pieces that warps copy, and what a thread block
// has in shared memory.
#pragma once
#include "../launch.h"
#include "common/cuda/device.cuh"
#include "linear.h"

namespace flashcell::cuda {

namespace {

constexpr int kRows = 16;    // rows of W in a tile
constexpr int kStep = 64;    // bytes of a row that four lanes take at once
constexpr int kColumns = 8;  // columns of the matrix instruction: rows of x
constexpr int kSums = kRows * kColumns;

// A warp copies 512 bytes of a row at once, or 256 where a block has only 99 KB of shared memory:
// sm_86, sm_89, sm_120.
constexpr int kLongSteps = 8, kShortSteps = 4;
constexpr int kSharedOfLong = 163 << 10, kSharedOfShort = 99 << 10;
// 256 bytes of a row of 8 bits, and 128 of int4, meet as many values of x as 512 of 16. Where there
// is much shared memory, two teams widen them.
constexpr int kSharedOfTeams = 227 << 10, kTeamsOfWidening = 2, kStagesOfEight = 4;
constexpr int kInt4Steps = 2, kInt4Stages = 6, kShortInt4Stages = 4;
// Turing's 64 KB hold 128 bytes of a row, and the sums of 8 rows of x.
constexpr int kTuringSteps = 2, kTuringStages = 2;

// What a kernel is compiled for. A team is eight warps with tiles of their own: widening weights
// takes so many instructions that two teams are needed to hide their latency. They share kStages_.
template <Format kFormat, int kSteps_, int kStages_, int kTiles_, int kTeams_>
struct Shape {
  static constexpr int kSteps = kSteps_, kTiles = kTiles_;
  static constexpr bool kTuring = kSteps == kTuringSteps && kStages_ == kTuringStages;
  static constexpr bool kPlain = kFormat == Format::kPlain, kInt4 = kFormat == Format::kInt4;
  static constexpr int kTeams = kTiles == 1 ? kTeams_ : 1, kStages = kStages_ / kTeams;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;  // of a team

  // A piece of a tile: its 16 rows by kSteps steps of the depth. Bytes from row to row: two rows at
  // once share no bank, with scales by their stride (but where 16-bit weights of the same call use
  // rings of int4), or else because every other row swaps the steps of a pair.
  static constexpr int kRowBytes = kStep * kSteps, kScaleBytes = kInt4 ? kRowBytes / 8 : 0;
  static constexpr int kStride = kRowBytes + kScaleBytes, kSwap = kScaleBytes ? 0 : kStep;
  static constexpr int kBytes = kRows * kStride, kRingBytes = kTeams * kWarps * kStages * kBytes;
  static constexpr int kLanes = kRowBytes / 16;  // lanes that copy a row
  static constexpr int kRowsAtOnce = 32 / kLanes;

  // The outputs of a tile, one a thread, take a group of warps. Groups take turns, and only the one
  // whose turn it is waits for all sums: with one buffer more than groups, none is overwritten.
  static constexpr int kOutputs = kTiles * kSums, kGroups = kThreads / kOutputs;
  static constexpr int kBuffers = kGroups + 1;
  static constexpr int kSumBytes = kTeams * kBuffers * kWarps * kTiles * (kSums + kColumns) * 4;
  static_assert(kRingBytes + kSumBytes <= (kTuring                ? kTuringSharedBytes
                                           : kTeams > 1           ? kSharedOfTeams
                                           : kSteps == kLongSteps ? kSharedOfLong
                                                                  : kSharedOfShort));
};

template <auto kValue>
struct Constant {};

DEVICE int smaller(int a, int b) { return a < b ? a : b; }

// The first row of a tile: 16 rows of one matrix, or 8 of each of two gated matrices.
struct Place {
  int which, row;
};

DEVICE Place find(const LinearStepParams& p, int tile) {
  Place place{0, tile};
  if (p.gated) {
    place.row *= kRows / 2;
    return place;
  }
  for (int own; place.row >= (own = int((p.linears[place.which].rows + kRows - 1) / kRows));) {
    place.row -= own, ++place.which;
  }
  place.row *= kRows;
  return place;
}

// Returns the bytes of a row of a matrix, which is of the format if it has scales.
template <Format kFormat>
DEVICE int bytes_of(const Linear& linear, int K) {
  if (kFormat == Format::kPlain || linear.scale == nullptr) return 2 * K;
  return kFormat == Format::kInt4 ? K / 2 : K;
}

// Returns the number of pieces of a row of a matrix.
template <Format kFormat, int kRowBytes>
DEVICE int pieces_of(const Linear& linear, int K) {
  return (bytes_of<kFormat>(linear, K) + kRowBytes - 1) / kRowBytes;
}

// The tiles of a team: every `stride`th from `first` on, once for each of its passes over the rows
// of x: every `pass_stride`th from `first_pass` on.
struct Tiles {
  int first, stride, count, first_pass, pass_stride, passes;
};

}  // namespace
}  // namespace flashcell::cuda
