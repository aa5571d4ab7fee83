// The cell warps of the grid engine: one thread for each unit and column of a tile. While the
// product warps multiply, they load the other inputs of a step. All blocks wait for what they
// publish, so the path to publishing is kept short.
#pragma once
#include "inputs.cuh"

namespace flashcell::cuda::grid {

template <typename Pass, int kHalves, bool kMarked>
struct Cells : Block<Pass> {
  using IO = typename Pass::IO;
  using Block<Pass>::p, Block<Pass>::range, Block<Pass>::shared, Block<Pass>::D;
  using Block<Pass>::head, Block<Pass>::first_unit, Block<Pass>::lane;
  static constexpr Shape kShape = Pass::kShape;
  static constexpr int kGates = Pass::kGates, kStates = kShape.states, kSplit = Pass::kSplit;
  using Block<Pass>::kColumns, Block<Pass>::kUnits, Block<Pass>::kCells;
  static constexpr int kWide = Pass::kWide;  // columns of a thread, eight apart
  // Whether a column's inputs are prepared only after the sums, because registers are scarce.
  static constexpr bool kPreparesLate = kWide > 1 && Pass::kDescends;
  static constexpr int kAll = kHalves * kCells, kRing = kStages / kHalves;
  static constexpr int kBlockThreads = kProducts + kAll + fetch_threads(kShape);
  static constexpr int kVector = IoTraits<IO>::kVector, kUnitVectors = kUnits / kVector;

  int first_tile = 0, tiles = 0;
  unsigned item = 0;  // number of (step, tile) pairs this half has done
  float bias[Pass::kBias];
  // Difference between an address in this block and the same one in another block of the cluster.
  uint32_t way[kSplit];

  // A warp copies its own inputs, unless the block has separate warps for that (Fetch).
  static constexpr bool kCopies = fetch_threads(kShape) == 0;
  Inputs<Pass, 1> inputs;
  int stage = 0;
  unsigned phase = 0;  // phase of the `fetched` barriers

  // With two halves, one runs the cell of tiles 0, 2, ..., the other of tiles 1, 3, ...
  DEVICE int thread() const { return int(threadIdx.x) - kProducts; }
  DEVICE int half() const { return int((threadIdx.x - kProducts) / kCells); }
  DEVICE bool has_cell(int tile) const { return kHalves == 1 || tile % 2 == half(); }
  DEVICE int place() const { return int((threadIdx.x - kProducts) % kCells); }
  DEVICE int warp() const { return place() / 32; }
  DEVICE int column() const { return column_of(kUnits, place()); }
  DEVICE int unit_here() const { return place() % kUnits; }
  DEVICE int unit() const { return first_unit + unit_here(); }
  DEVICE int64_t at() const { return int64_t(head) * D + unit(); }  // offset in [N, D]
  DEVICE int64_t sequence(int tile, int c) const {
    return (first_tile + int64_t(tile) * range.groups) * kColumns + c;
  }

  DEVICE Cells(const Block<Pass>& block) : Block<Pass>(block), inputs(block, warp()) {
    if constexpr (kSplit > 1) {
      const uint32_t here = shared_address(&shared);
#pragma unroll
      for (int to = 0; to < kSplit; ++to) way[to] = cluster_address(here, to) - here;
    }
#pragma unroll
    for (int row = 0; row < Pass::kBias; ++row) {
      bias[row] = 0.0f;
      if constexpr (!Pass::kDescends) {
        if (p.bias != nullptr && unit() < D) {
          bias[row] = static_cast<const float*>(p.bias)[row * p.N * p.D + at()];
        }
      }
    }
  }

  DEVICE void run() {
    this->rounds([&](int first, int count) {
      first_tile = first, tiles = count;
      named_barrier_sync_diverged<kBlockThreads>(kRound);  // wait for the end of the round before
      begin_round();
      named_barrier_sync_diverged<kBlockThreads>(kRound);
      run_round();
      named_barrier_sync<kAll>(kCellsOnly);
      end_round();
    });
  }

  DEVICE void begin_round() {
    if (thread() < tiles * kColumns) {
      int64_t x_batch = 0;
      if constexpr (!Pass::kDescends) x_batch = p.x_batch;
      const int tile = thread() / kColumns, c = thread() % kColumns;
      shared.columns[tile][c] = Column(p, sequence(tile, c), x_batch);
    }
    named_barrier_sync<kAll>(kCellsOnly);
    for (int tile = 0; tile < tiles; ++tile) {
      if (!has_cell(tile)) continue;
#pragma unroll
      for (int side = 0; side < kWide; ++side) {
        const int c = column() + 8 * side;
        const bool exists = unit() < D && sequence(tile, c) < p.S;
        const int64_t from = shared.columns[tile][c].index * p.N * D + at();
#pragma unroll
        for (int k = 0; k < kStates + kShape.sums; ++k) {
          const bool is_state = exists && k < kStates;
          const float first = is_state ? Pass::first_state(p, k, from) : 0.0f;
          shared.carried[tile][k][place() + side * kCells] = first;
        }
      }
    }
    if (thread() < tiles) {
      int length = 0;
      for (const Column& c : shared.columns[thread()]) length = max(length, c.length);
      shared.lengths[thread()] = length;
      for (int& step : shared.published[thread()]) step = Pass::kDescends ? length : -1;
    }
  }

  DEVICE void note(const Walk& walk) {
    *const_cast<volatile int*>(&shared.published[walk.tile][warp()]) = walk.t;
  }

  // Returns the next tile of this half.
  DEVICE Walk following(const Walk& walk, const Route& route) const {
    if (walk.t == route.end) return walk;
    return Block<Pass>::template following<kHalves>(walk, route, kHalves == 1 ? 0 : half());
  }

  DEVICE void run_round() {
    const Route route = this->route(tiles);
    Walk at = this->template first<kHalves>(route, kHalves == 1 ? 0 : half());
    if constexpr (kCopies) {
      copy_and_run(route, at);
    } else {
      const auto run_step = [&](const Walk& walk) {
        mbarrier_poll(shared.fetched[stage], phase);
        step(walk, stage);
        if (lane() == 0) note(walk);
        ++item;
        if (++stage == kRing) stage = 0, phase ^= 1;
      };
      if (!kMarked && this->whole()) {
        for (int t = route.begin; t != route.end; t += Pass::kDescends ? -1 : 1) {
          for (int tile = 0; tile < tiles; ++tile) run_step({t, tile});
        }
      } else {
        for (; at.t != route.end; at = following(at, route)) run_step(at);
      }
    }
  }

  // Each half has its own part of the ring, so neither waits for the other.
  DEVICE void copy_and_run(const Route& route, Walk at) {
    const int ring = half() * kRing;
    Walk ahead = at;
    for (int stage = 0; stage < kRing - 1; ++stage) {
      inputs.copy(ring + stage, ahead, route), copy_commit();
      ahead = following(ahead, route);
    }
    for (int stage = 0; at.t != route.end; stage = stage + 1 == kRing ? 0 : stage + 1) {
      copy_wait<kRing - 2>();
      __syncwarp();
      step(at, ring + stage);
      if (lane() == 0) note(at);
      ++item;
      inputs.copy(ring + (stage == 0 ? kRing : stage) - 1, ahead, route), copy_commit();
      ahead = following(ahead, route);
      at = following(at, route);
    }
  }

  DEVICE void release(int stage) const {
    __syncwarp();
    if (lane() == 0) cuda::mbarrier_arrive(shared.released[stage]);
  }

  DEVICE Spot spot(const Walk& walk, int c) const {
    unsigned row, flags;
    bool exists = unit() < D;
    if (!kMarked && this->whole()) {
      const int s = (first_tile + walk.tile * range.groups) * kColumns + c;
      row = unsigned(s) * unsigned(p.T), flags = Pass::flags(p, walk.t), exists &= s < int(p.S);
    } else {
      const Column& column = shared.columns[walk.tile][c];
      row = unsigned(column.row);
      flags = Pass::template operand<kMarked>(p, {column, p}, walk.t).flags;
    }
    return {row + walk.t, range.panel, at(), flags, exists && (flags & kRuns)};
  }

  DEVICE void step(const Walk& walk, int stage) {
    Spot spots[kWide];
    typename Pass::Unit units[kWide];
    float* states = &shared.carried[walk.tile][0][place()];
#pragma unroll
    for (int side = 0; side < kWide; ++side) spots[side] = spot(walk, column() + 8 * side);
    const auto prepare = [&](int side) {
      const IO* inputs = &shared.inputs[stage][0][column() + 8 * side][unit_here()];
      units[side] = Pass::prepare(p, spots[side], inputs, bias, states + side * kCells);
    };
#pragma unroll
    for (int side = 0; side < kWide && !kPreparesLate; ++side) prepare(side);
    if (!kCopies && !kPreparesLate) release(stage);

    const int buffer = kHalves == 2 ? half() : item % 2;
    named_barrier_sync<kProducts + kCells>(kFilled + buffer);
    typename Shared<Pass>::Sums sums[kWide];
#pragma unroll
    for (int side = 0; side < kWide; ++side) {
      sums[side] = sum(shared.partials[buffer], column() + 8 * side);
    }
    __syncwarp();
    // Arrive before any arithmetic on the sums: otherwise the compiler would schedule the
    // arithmetic first, and the product warps would wait for it.
    float& last = sums[kWide - 1].sum[kShape.rows - 1];
    mbarrier_arrive(shared.emptied[buffer], lane() == 0, sums[0].sum[0], last);
    if constexpr (kSplit > 1) exchange(sums);
#pragma unroll
    for (int side = 0; side < kWide; ++side) {
      if (kPreparesLate) prepare(side);
      if (!kCopies && kPreparesLate && side == kWide - 1) release(stage);
      Pass::cell(p, spots[side], units[side], sums[side].sum, bias, states + side * kCells);
    }
  }

  template <typename Partials>
  DEVICE typename Shared<Pass>::Sums sum(const Partials& partials, int column) const {
    typename Shared<Pass>::Sums sums[kWarps];
    const int slot = column * Shared<Pass>::kColumnSlots + unit_here();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sums[w] = partials[w][slot];
#pragma unroll
    for (int half = kWarps / 2; half > 0; half /= 2) {
#pragma unroll
      for (int w = 0; w < half; ++w) sums[w] = sums[w] + sums[w + half];
    }
    return sums[0];
  }

  // Sends the sums of other blocks' units to those blocks, and adds the received sums of our units
  // in the order of the blocks. Two inboxes suffice: a block sends for the step after the next only
  // after it has received all of the next, and by then this step's inbox has been read.
  template <typename Sums>
  DEVICE void exchange(Sums (&sums)[kWide]) {
    const int buffer = item % 2, rank = this->rank();
    uint64_t& received = shared.received[half()][buffer];
    auto& inbox = shared.inbox[half()][buffer];
    if (place() == 0) mbarrier_arrive_expect_tx(received, (kSplit - 1) * kWide * kCells * 4);
    float own[kWide];
    const uint32_t place_here = shared_address(&inbox[rank][place()]);
#pragma unroll
    for (int to = 0; to < kSplit; ++to) {
#pragma unroll
      for (int side = 0; side < kWide; ++side) {
        if (to == rank) {
          own[side] = sums[side].sum[to];
        } else {
          store_async(place_here + side * kCells * 4 + way[to], shared_address(&received) + way[to],
                      __float_as_uint(sums[side].sum[to]));
        }
      }
    }
    mbarrier_poll(received, item / 2 % 2);
#pragma unroll
    for (int side = 0; side < kWide; ++side) {
      float sum = 0.0f;
#pragma unroll
      for (int from = 0; from < kSplit; ++from) {
        sum += from == rank ? own[side] : inbox[from][place() + side * kCells];
      }
      sums[side].sum[0] = sum;
    }
  }

  DEVICE void end_round() {
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
      for (int side = 0; side < kWide; ++side) {
        const int c = column() + 8 * side;
        if (!has_cell(tile) || unit() >= D || sequence(tile, c) >= p.S) continue;
        const int64_t to = shared.columns[tile][c].index * p.N * D + at();
#pragma unroll
        for (int k = 0; k < kStates; ++k) {
          Pass::last_state(p, k, to, shared.carried[tile][k][place() + side * kCells]);
        }
      }
    }
    if constexpr (Pass::kDescends) {  // write one row of dbias_partial for every eight sequences
      for (unsigned i = threadIdx.x - kProducts; i < tiles * kWide * kShape.sums * kUnits;
           i += kAll) {
        const int u = i % kUnits, row = i / kUnits % kShape.sums;
        const int eighth = i / kUnits / kShape.sums, side = eighth % kWide, tile = eighth / kWide;
        const float* of_side = &shared.carried[tile][kStates + row][side * kCells];
        float sum = 0.0f;
        for (int c = 0; c < 8; ++c) sum += of_side[place_of(kUnits, c, u)];
        const int64_t first = sequence(tile, 8 * side);
        const int64_t to = (first / 8 * kShape.sums + row) * p.N + head;
        if (first_unit + u < D && first < p.S) {
          static_cast<float*>(p.dbias_partial)[to * D + first_unit + u] = sum;
        }
      }
    }
    Pass::pad(p, [&](IO* tensor, int rows) {
      for (int i = 0; i < tiles * kColumns; ++i) {
        const Column& c = shared.columns[i / kColumns][i % kColumns];
        for (int64_t j = thread(); j < int64_t(c.padding) * rows * kUnitVectors; j += kAll) {
          const int64_t row = (c.row + c.length) * rows + j / kUnitVectors;
          const int to = first_unit + int(j % kUnitVectors) * kVector;
          if (to < D) *reinterpret_cast<uint4*>(tensor + (row * p.N + head) * D + to) = uint4{};
        }
      }
    });
  }
};

}  // namespace flashcell::cuda::grid
