// The parts that both directions of the block engine share: sizes, and the pipelines that load
// inputs and store outputs through shared memory.
#pragma once
#include "../sequence.cuh"
#include "plan.h"

namespace flashcell::cuda {

// Returns the sequence of a column of the tile that starts at sequence `first`, or p.S for an empty
// column. kPerLane is the number of columns of a lane.
template <int kPerLane>
DEVICE int64_t sequence_of(const SequenceParams& p, int64_t first, int column) {
  if (kPerLane == 1 && column % 2 == 1) return p.S;
  return min(p.S, first + (kPerLane == 1 ? column / 2 : column));
}

// Sizes of a direction whose product has depth `kDepth` and `kUnitsOf` units per warp. kWidth is D
// rounded up.
template <typename Cell_, typename IO_, int kWidth, int kUnitsOf, int kDepth>
struct BlockSizes {
  using Cell = Cell_;
  using IO = IO_;
  using V = typename IoTraits<IO>::Value;
  static constexpr int G = Cell::kGates, K = Cell::kStates, R = Cell::kBias, kKept = Cell::kSaved;
  static constexpr int kUnits = kUnitsOf, kThreads = 32 * kWidth / kUnits;
  static constexpr int kWeightRowBytes = kWidth * sizeof(IO);
  // A row's length is padded, so that columns start in different banks.
  static constexpr int kRow = kDepth + IoTraits<IO>::kVector;
  // Steps of two vectors along the depth.
  static constexpr int kSteps = kDepth / (2 * IoTraits<IO>::kVector);
  static constexpr int kOperandBytes = kColumns * kRow * sizeof(IO);

  template <typename Inputs, typename Outputs>
  struct Memory {
    // Operand of the product, double-buffered by the parity of the step.
    IO operand[2][kColumns][kRow];
    typename Inputs::Shared inputs;
    typename Outputs::Shared outputs;
  };
};

// Loads inputs ahead of their use: a ring of stages in shared memory, each with the kRows rows of
// one step. With a step every 0.2 us and a memory latency of up to 1 us it has eight stages, if
// they fit.
template <typename IO, int kWidth, int kRows, int kThreads, int kSplit>
struct Pipeline {
  static constexpr int kVectors = kWidth / IoTraits<IO>::kVector;  // vectors in a row
  // A row's length is padded, so that columns start in different banks.
  static constexpr int kRow = kWidth + IoTraits<IO>::kVector;
  static constexpr int kRowsAtOnce = kThreads / (kColumns * kVectors);
  static constexpr int kStageBytes = kRows * kColumns * kRow * sizeof(IO);
  static constexpr int kStages = block::stages(kStageBytes, kIsTuring);

  struct Shared {
    IO rows[kStages][kRows][kColumns][kRow];
  };

  // A thread copies the same vector of the same column in every step.
  static DEVICE int column() { return threadIdx.x / kVectors % kColumns; }
  static DEVICE int vector() { return threadIdx.x % kVectors; }

  static constexpr int kRowBytes = kColumns * kRow * sizeof(IO);

  uint32_t lane_tiles;    // shared address of the lane's part of a tile, in stage 0
  uint32_t slot;          // shared address of the vector that this thread copies, in stage 0
  const IO* source;       // row `first` of the next step, in the thread's column
  const IO* last_source;  // row kRows - 1 if it is in another tensor, else null
  int row_stride, step_stride, last_step_stride;  // is_aligned() checks that these fit in 32 bits
  int length;  // steps that exist; 0 for vectors outside the head
  int first;   // the thread copies rows first, first + kRowsAtOnce, ...

  // `unit` is the first unit of the warp's tiles. kSplit is the number of neighbouring tiles of a
  // row, 8 units apart. Steps ascend (direction 1, from 0) or descend (-1, from `from`).
  DEVICE Pipeline(Shared& shared, int unit, int length, int D, int from, int direction,
                  const IO* source, int64_t row_stride, int64_t time_stride,
                  const IO* last_source = nullptr, int64_t last_time_stride = 0)
      : row_stride(int(row_stride) * kRowsAtOnce),
        step_stride(direction * int(time_stride)),
        last_step_stride(direction * int(last_time_stride)),
        length(vector() * IoTraits<IO>::kVector < D ? length : 0),
        first(threadIdx.x / (kColumns * kVectors)) {
    // For the instruction that loads four tiles every lane supplies a row address: it selects the
    // row and, in the backward pass, the half of the 16 units. If there are fewer than four tiles,
    // the last row's address is repeated.
    static_assert(kRows * kSplit < 4 || kRows * kSplit % 2 == 0 || sizeof(IO) == 4);
    const int tile = sizeof(IO) == 2 ? threadIdx.x % 32 / 8 : 0;
    const int row = min(tile / kSplit, kRows - 1), half = tile % kSplit;
    lane_tiles = keep(shared_address(&shared.rows[0][0][0][unit + half * 8]) + row * kRowBytes +
                      tile_offset<IO, kRow>() * sizeof(IO));
    slot = keep(shared_address(&shared.rows[0][first][column()][vector() * IoTraits<IO>::kVector]));
    this->source =
        source + from * time_stride + first * row_stride + vector() * IoTraits<IO>::kVector;
    this->last_source = nullptr;
    if (last_source != nullptr) {
      this->last_source = last_source + from * last_time_stride + vector() * IoTraits<IO>::kVector;
    }
    for (int i = 0; i < kStages - 1; ++i) start(from + i * direction);
  }

  // Starts the copies for step t, the step after that of the last call. Every call commits one
  // group, even if it copies nothing.
  DEVICE void start(int t) {
    if (unsigned(t) < unsigned(length)) {
      const uint32_t to = slot + unsigned(t) % kStages * kStageBytes;
      const IO* from = source;
#pragma unroll
      for (int row = 0; row < kRows; row += kRowsAtOnce) {
        const bool is_last = row + kRowsAtOnce >= kRows && first + row == kRows - 1;
        if (row + kRowsAtOnce <= kRows || first + row < kRows) {
          copy_async(to + row * kRowBytes, is_last && last_source != nullptr ? last_source : from);
        }
        from += row_stride;
      }
    }
    source += step_stride, last_source += last_source != nullptr ? last_step_stride : 0;
    copy_commit();
  }

  // Waits until this thread's copies for the next step have landed; a barrier must follow before
  // other threads read them. kBehind is the number of calls of start() that this step makes after
  // its wait.
  template <int kBehind = 0>
  DEVICE void wait() {
    copy_wait<kStages - 2 - kBehind>();
  }

  // Loads the warp's tiles of step t: row by row, kSplit tiles of each.
  template <int kCount>
  DEVICE void load(ColumnPair<IO> (&values)[kCount], int t) const {
    load_tiles<kRow>(values, lane_tiles + unsigned(t) % kStages * kStageBytes, [](int i) {
      return i / kSplit * kRowBytes + i % kSplit * 8 * int(sizeof(IO));
    });
  }
};

// Stores outputs: keeps those of the last two steps in shared memory, by parity, and copies them to
// global memory in whole vectors.
template <typename IO, int kWidth, int kRows, int kThreads>
struct Outbox {
  static constexpr int kVectors = kWidth / IoTraits<IO>::kVector,
                       kRow = kWidth + IoTraits<IO>::kVector;
  static constexpr int kRowsAtOnce = kThreads / (kColumns * kVectors);
  static constexpr int kPasses = (kRows + kRowsAtOnce - 1) / kRowsAtOnce;

  struct Shared {
    IO rows[2][kRows][kColumns][kRow];
  };

  // A thread sends the same vector of the same column (the one it copies for the Pipeline) in every
  // step, for the rows first(), first() + kRowsAtOnce, ...
  static DEVICE int column() { return threadIdx.x / kVectors % kColumns; }
  static DEVICE int vector() { return threadIdx.x % kVectors; }
  static DEVICE int first() { return threadIdx.x / (kColumns * kVectors); }

  static constexpr int kRowBytes = kColumns * kRow * sizeof(IO), kBytes = kRows * kRowBytes;

  uint32_t lane_tiles;  // shared address of the lane's part of a tile, in even steps
  uint32_t slot;        // shared address of the vector that this thread sends, in even steps
  IO* to[kPasses];      // destination for the next step
  int stride[kPasses];  // elements from a step to the next
  // Steps to send; 0 for vectors outside the head and for rows without a target.
  int length[kPasses];

  // `unit` is the first unit of the warp's tiles. `target(row)` returns where a row of the first
  // step to send starts, or null; `step(row)` returns its stride.
  template <typename Target, typename Step>
  DEVICE Outbox(Shared& shared, int unit, int length, int D, Target target, Step step) {
    lane_tiles =
        keep(shared_address(&shared.rows[0][0][0][unit]) + tile_offset<IO, kRow>() * sizeof(IO));
    slot =
        keep(shared_address(&shared.rows[0][first()][column()][vector() * IoTraits<IO>::kVector]));
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int row = first() + i * kRowsAtOnce;
      IO* start = row < kRows && vector() * IoTraits<IO>::kVector < D ? target(row) : nullptr;
      to[i] = start + vector() * IoTraits<IO>::kVector;
      stride[i] = start == nullptr ? 0 : int(step(row));
      this->length[i] = start == nullptr ? 0 : length;
    }
  }

  // Stores the warp's tile of a row of step t to shared memory; with half = 1, 8 units further.
  DEVICE void put(int t, int row, const ColumnPair<IO>& value, int half = 0) {
    const int at = (t & 1) * kBytes + row * kRowBytes + half * 8 * int(sizeof(IO));
    store_tile<kRow>(lane_tiles + at, value);
  }

  // Copies step t to global memory; all values must have been made visible by a barrier.
  DEVICE void send(int t) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      if (unsigned(t) < unsigned(length[i])) {
        uint4 v;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(slot + (t & 1) * kBytes + i * kRowsAtOnce * kRowBytes));
        *reinterpret_cast<uint4*>(to[i]) = v;
      }
      to[i] += stride[i];
    }
  }

  // Writes zeros for `count` steps, starting `step` steps after the one that would be sent next.
  DEVICE void clear(int64_t step, int count) {
    for (int i = 0; i < kPasses; ++i) {
      for (int64_t n = step; stride[i] != 0 && n < step + count; ++n) {
        *reinterpret_cast<uint4*>(to[i] + n * stride[i]) = uint4{};
      }
    }
  }
};

}  // namespace flashcell::cuda
