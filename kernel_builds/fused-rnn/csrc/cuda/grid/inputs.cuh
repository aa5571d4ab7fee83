// Copies the inputs of the next steps to a ring in shared memory before the cell needs them.
#pragma once
#include "block.cuh"

namespace flashcell::cuda::grid {

// Copies the inputs of kShares cell warps, kEvery warps apart. A lane copies the same vectors of
// the same rows in every step.
template <typename Pass, int kShares, int kEvery = 1>
struct Inputs : Block<Pass> {
  using IO = typename Pass::IO;
  using Block<Pass>::p, Block<Pass>::range, Block<Pass>::shared, Block<Pass>::D;
  using Block<Pass>::head, Block<Pass>::first_unit, Block<Pass>::lane, Block<Pass>::kUnits;
  static constexpr int kRows = Pass::kShape.inputs, kWide = Pass::kWide;
  static constexpr int kVector = IoTraits<IO>::kVector;
  // Vectors of a row, and rows that a warp copies at once.
  static constexpr int kVectors = 32 / kVector, kRowsAtOnce = kVector / kWide;
  static constexpr int kTimes = int(divide_up(kRows, kRowsAtOnce));

  const int warp;             // the first of the cell warps
  const IO* sources[kTimes];  // source addresses for the first of the cell warps
  const IO* line;             // the line of the exchange tensor

  DEVICE int place(int share) const {
    return (warp + share * kEvery) * 32 + lane() % kVectors * kVector;
  }
  DEVICE int part(int share) const { return place(share) % kUnits; }
  DEVICE int column(int share) const {
    return column_of(kUnits, place(share)) + lane() / kVectors % kWide * 8;
  }
  DEVICE int row() const { return lane() / (kVectors * kWide); }

  DEVICE Inputs(const Block<Pass>& block, int first_warp) : Block<Pass>(block), warp(first_warp) {
    const int unit = first_unit + part(0);
    line = Pass::medium(p) + row() * range.panel + head * D + unit;
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      sources[i] = Pass::inputs(p, head, row() + i * kRowsAtOnce) + unit;
    }
  }

  // Copies a step's inputs, and prefetches the step's line of the exchange tensor to L2.
  DEVICE void copy(int stage, const Walk& walk, const Route& route) {
    if (walk.t == route.end) return;
#pragma unroll
    for (int share = 0; share < kShares; ++share) {
      const int c = column(share), part = this->part(share), on = part - this->part(0);
      const Column& column = shared.columns[walk.tile][c];
      if (!column.runs(walk.t) || first_unit + part >= D) continue;
#pragma unroll
      for (int i = 0; i < kTimes; ++i) {
        const int row = this->row() + i * kRowsAtOnce;
        if (row < kRows) {
          copy_async(&shared.inputs[stage][row][c][part],
                     sources[i] + Pass::input(p, column, row, walk.t) + on);
        }
        if (part % 16 == 0 && row < Pass::kGates) {
          const uint64_t to = (unsigned(column.row) + walk.t) * Pass::kGates + i * kRowsAtOnce;
          // Readers would wait for DRAM if the line had been evicted since the fill.
          prefetch_l2(line + to * range.panel + on);
        }
      }
    }
  }
};

// The warps that copy inputs for the cell warps, which then have less to do.
template <typename Pass>
struct Fetch : Block<Pass> {
  static constexpr int kThreads = fetch_threads(Pass::kShape), kWarps = kThreads / 32;
  static constexpr int kCellWarps = Shared<Pass>::kCellWarps;
  static constexpr int kBlockThreads = kProducts + 32 * kCellWarps + kThreads;
  static_assert(kCellWarps % kWarps == 0);
  using Block<Pass>::shared;

  Inputs<Pass, kCellWarps / kWarps, kWarps> inputs;
  int stage = 0;
  unsigned phase = 1;  // phase of the `released` barriers; at first all stages are free

  DEVICE Fetch(const Block<Pass>& block)
      : Block<Pass>(block), inputs(block, int(threadIdx.x / 32) - kProducts / 32 - kCellWarps) {}

  DEVICE void run() {
    this->rounds([&](int, int tiles) {
      named_barrier_sync_diverged<kBlockThreads>(kRound);  // wait for the end of the round before
      named_barrier_sync_diverged<kBlockThreads>(kRound);
      const Route route = this->route(tiles);
      for (Walk at = this->first(route); at.t != route.end; at = this->following(at, route)) {
        mbarrier_poll(shared.released[stage], phase);
        inputs.copy(stage, at, route);
        mbarrier_arrive_after_copies(shared.fetched[stage]);
        if (++stage == kStages) stage = 0, phase ^= 1;
      }
    });
  }
};

}  // namespace flashcell::cuda::grid
