// The shapes of linear.cuh: what a warp takes at a time, in which order, and what a thread block
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

// A warp copies 256 bytes of a row at once; of int4 128, which meet as many values of x as 256 of 8
// bits and 512 of 16. Where a thread block may have 163 KB of shared memory there are sixteen
// warps for up to 8 rows of x, which hides the latency of instructions; sm_86, sm_89 and sm_120
// have 99 KB, and eight.
constexpr int kSteps = 4, kStages = 2, kInt4Steps = 2, kInt4Stages = 3;
constexpr int kSharedOfMany = 163 << 10, kSharedOfFew = 99 << 10;
constexpr int kManyWarps = 16, kFewWarps = 8;
// Turing's 64 KB hold 128 bytes of a row, and the sums of 8 rows of x.
constexpr int kTuringSteps = 2, kTuringStages = 2;

// Of the GPUs that run this code, the most shared memory for which there is a kernel, and the least
// that a thread block may have, or 0 if that is not known.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool kMayTakeDigits = false;
#else
constexpr bool kMayTakeDigits = true;
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kMostShared = kSharedOfFew, kLeastShared = 0;
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr int kMostShared = 227 << 10, kLeastShared = kMostShared;
#else
constexpr int kMostShared = 227 << 10, kLeastShared = 0;
#endif

// What a kernel is compiled for.
template <Format kFormat_, int kSteps_, int kStages_, int kTiles_, int kWarps_,
          bool kDigits_ = false>
struct Shape {
  static constexpr Format kFormat = kFormat_;
  static constexpr int kSteps = kSteps_, kStages = kStages_, kTiles = kTiles_, kWarps = kWarps_;
  static constexpr bool kTuring = kSteps == kTuringSteps && kStages == kTuringStages;
  static constexpr bool kPlain = kFormat == Format::kPlain, kInt4 = kFormat == Format::kInt4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr bool kTakesDigits = kDigits_;  // linear_digits.cuh

  // A piece of a tile: its 16 rows by kSteps steps of the depth. Bytes from row to row: two rows at
  // once share no bank, with scales by their stride (but where 16-bit weights of the same call use
  // rings of int4), or else because every other row swaps the steps of a pair.
  static constexpr int kRowBytes = kStep * kSteps, kScaleBytes = kInt4 ? kRowBytes / 8 : 0;
  static constexpr int kStride = kRowBytes + kScaleBytes, kSwap = kScaleBytes ? 0 : kStep;
  static constexpr int kBytes = kRows * kStride, kRingBytes = kWarps * kStages * kBytes;
  static constexpr int kLanes = kRowBytes / 16;  // lanes that copy a row
  static constexpr int kRowsAtOnce = 32 / kLanes;
  static constexpr int kSumBytes = kWarps * kTiles * (kSums + kColumns) * 4;
  static constexpr int kSharedBytes = kTuring              ? kTuringSharedBytes
                                      : kWarps > kFewWarps ? kSharedOfMany
                                                           : kSharedOfFew;
  static_assert(kRingBytes + kSumBytes <= kSharedBytes);
  // Whether launch_linear_step may choose the kernel where this code runs.
  static constexpr bool kRuns = kIsTuring == kTuring && kSharedBytes <= kMostShared &&
                                (kMayTakeDigits || !kTakesDigits) &&
                                (kTiles > 1 || kWarps > kFewWarps || kLeastShared < kSharedOfMany);
};

template <auto kValue>
struct Constant {};

// Asks for the line at an address, which will be read.
DEVICE void fetch([[maybe_unused]] const void* at) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
#endif
}

DEVICE int smaller(int a, int b) { return a < b ? a : b; }

// Returns the bytes of a row of a matrix, which is of the format if it has scales.
template <Format kFormat>
__host__ DEVICE int bytes_of(const Linear& linear, int K) {
  if (kFormat == Format::kPlain || linear.scale == nullptr) return 2 * K;
  return kFormat == Format::kInt4 ? K / 2 : K;
}

// A piece of a tile: 16 rows of one matrix, or 8 of each of two gated matrices.
struct Place {
  int which, row, piece, pieces;  // the matrix, the tile's first row, and its number of pieces
};

// The order in which pieces are multiplied: a tile's one after the other, and tiles as they lie in
// memory. Every thread block has an equal part, up to a whole tile, and every warp a part of that.
struct Order {
  int blocks, each, rest;  // pieces of a block: `each`, and of the first `rest` blocks one more
  int rows_of_tile;
  struct {
    int rows, tiles, pieces;  // pieces of a tile
  } of[kLinears];

  template <typename Own>
  static Order make(const LinearStepParams& p, int64_t processors) {
    Order order{};
    order.rows_of_tile = p.gated ? kRows / 2 : kRows;
    int64_t tiles = 0, pieces = 0;
    for (int which = 0; which < (p.gated ? 1 : p.count); ++which) {
      auto& own = order.of[which];
      const int bytes = bytes_of<Own::kFormat>(p.linears[which], int(p.K));
      own.rows = int(p.linears[which].rows);
      own.tiles = (own.rows + order.rows_of_tile - 1) / order.rows_of_tile;
      // no columns are a piece of zeros
      own.pieces = bytes > 0 ? (bytes + Own::kRowBytes - 1) / Own::kRowBytes : 1;
      tiles += own.tiles, pieces += int64_t(own.tiles) * own.pieces;
    }
    order.blocks = int(tiles < processors ? tiles : processors);
    if (tiles == 0) return order;
    order.each = int(pieces / order.blocks), order.rest = int(pieces % order.blocks);
    return order;
  }

  DEVICE Place find(int at) const {
    int which = 0;
    for (int own; at >= (own = of[which].tiles * of[which].pieces); ++which) at -= own;
    const int pieces = of[which].pieces, tile = int(uint32_t(at) / uint32_t(pieces));
    return {which, tile * rows_of_tile, at - tile * pieces, pieces};
  }
  // Returns a block's first piece, with which a tile begins.
  DEVICE int start(int block) const {
    const int at = each * block + smaller(rest, block);
    if (block == blocks) return at;
    const Place place = find(at);
    return place.piece == 0 ? at : at + place.pieces - place.piece;
  }
  DEVICE void next_tile(Place& place) const {
    place.row += rows_of_tile, place.piece = 0;
    while (place.row >= of[place.which].rows) {
      place.row = 0, place.pieces = of[++place.which].pieces;
    }
  }
};

// What a lane has of a step of int4: in a row of the tile's first 8 and in one of its last 8 a word
// of each of four groups, and these groups' factors.
template <typename Own>
class Int4Words {
 public:
  DEVICE Int4Words(const char* from, int s)
      : words_(from + threadIdx.x % 32 / 4 * Own::kStride + kStep * s + threadIdx.x % 4 * 4) {
    const char* const scales = from + threadIdx.x % 32 / 4 * Own::kStride + Own::kRowBytes + 8 * s;
    low_ = *reinterpret_cast<const uint2*>(scales);
    high_ = *reinterpret_cast<const uint2*>(scales + kHigh);
  }
  DEVICE uint32_t low(int j) const { return *reinterpret_cast<const uint32_t*>(words_ + 16 * j); }
  DEVICE uint32_t high(int j) const {
    return *reinterpret_cast<const uint32_t*>(words_ + kHigh + 16 * j);
  }
  DEVICE float low_scale(int j) const { return scale_of(low_, j); }
  DEVICE float high_scale(int j) const { return scale_of(high_, j); }

 private:
  static constexpr int kHigh = kRows / 2 * Own::kStride;
  const char* words_;
  uint2 low_, high_;

  DEVICE static float scale_of(const uint2& four, int j) {
    const uint32_t two = j < 2 ? four.x : four.y;
    return __uint_as_float(j % 2 ? two & 0xffff0000u : two << 16);
  }
};

}  // namespace
}  // namespace flashcell::cuda
