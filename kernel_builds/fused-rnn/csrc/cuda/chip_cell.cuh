// The cell warps of the whole-chip engine: a thread for each unit and column of a tile. While the
// product is under way they fetch what else a step needs; what they publish is waited for.
#pragma once
#include "chip_block.cuh"

namespace flashcell::cuda::chip {

template <typename Pass, int kHalves, bool kMarked>
struct Cells : Block<Pass> {
  using IO = typename Pass::IO;
  using Block<Pass>::p, Block<Pass>::range, Block<Pass>::shared, Block<Pass>::D;
  using Block<Pass>::head, Block<Pass>::first_unit, Block<Pass>::lane;
  static constexpr Shape kShape = Pass::kShape;
  static constexpr int kGates = Pass::kGates, kStates = kShape.states, kSplit = Pass::kSplit;
  static constexpr int kAll = kHalves * kCells, kRing = kStages / kHalves;
  static constexpr int kVector = Lane<IO>::kVector, kUnitVectors = kUnits / kVector;

  int first_tile = 0, tiles = 0;
  unsigned item = 0, own_item = 0;  // steps done by the thread's half, and sums exchanged
  float bias[Pass::kBias];

  // With two halves one runs the cell of tiles 0, 2, .., the other of 1, 3, ..
  DEVICE int thread() const { return int(threadIdx.x) - kProducts; }
  DEVICE int half() const { return thread() / kCells; }
  DEVICE bool has_cell(int tile) const { return kHalves == 1 || tile % 2 == half(); }
  DEVICE int place() const { return thread() % kCells; }
  DEVICE int warp() const { return place() / 32; }
  DEVICE int column() const { return column(lane() / 16); }
  DEVICE int column(int half) const { return warp() + half * 4; }
  DEVICE int unit() const { return first_unit + lane() % 16; }
  DEVICE int64_t at() const { return int64_t(head) * D + unit(); }  // in [N, D]
  DEVICE int64_t sequence(int tile, int c) const {
    return (first_tile + int64_t(tile) * range.groups) * kColumns + c;
  }

  DEVICE Cells(const Block<Pass>& block) : Block<Pass>(block) {
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
      barrier_wait<kProducts + kAll>(kRound);  // the round before is over
      begin_round();
      barrier_wait<kProducts + kAll>(kRound);
      run_round();
      barrier_wait<kAll>(kCellsOnly);
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
    barrier_wait<kAll>(kCellsOnly);
    for (int tile = 0; tile < tiles; ++tile) {
      if (!has_cell(tile)) continue;
      const bool exists = unit() < D && sequence(tile, column()) < p.S;
      const int64_t from = shared.columns[tile][column()].index * p.N * D + at();
#pragma unroll
      for (int k = 0; k < kStates + kShape.sums; ++k) {
        const bool is_state = exists && k < kStates;
        shared.carried[tile][k][place()] = is_state ? Pass::first_state(p, k, from) : 0.0f;
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

  // From `walk` on, the first step of a tile that the thread's half has.
  DEVICE Walk own(Walk walk, int end) const {
    while (walk.t != end && !has_cell(walk.tile)) walk = this->following(walk, tiles, end);
    return walk;
  }
  DEVICE Walk next(const Walk& walk, int end) const {
    return own(this->following(walk, tiles, end), end);
  }

  // Each half has its part of the ring: with tiles of uneven lengths one is far ahead of the other.
  DEVICE void run_round() {
    const int end = this->end(tiles), ring = kHalves == 2 ? half() * kRing : 0;
    Walk at = own(this->start(tiles), end), ahead = at;
    for (int stage = 0; stage < kRing - 1; ++stage) {
      copy(ring + stage, ahead, end);
      ahead = next(ahead, end);
    }
    for (int stage = 0; at.t != end; stage = stage + 1 == kRing ? 0 : stage + 1) {
      copy_wait<kRing - 2>();
      __syncwarp();
      step(at, ring + stage);
      if (lane() == 0) note(at);
      ++item;
      copy(ring + (stage == 0 ? kRing : stage) - 1, ahead, end);
      ahead = next(ahead, end);
      at = next(at, end);
    }
  }

  // The inputs of a step to the ring, and its line of the medium to L2: a warp's own columns.
  DEVICE void copy(int stage, const Walk& walk, int end) {
    constexpr int kCopies = kShape.inputs * 2 * kUnitVectors;
    if (walk.t != end) {
      const auto& columns = shared.columns[walk.tile];
#pragma unroll
      for (int first = 0; first < kCopies; first += 32) {
        const int i = first + lane(), part = i % kUnitVectors * kVector;
        const int c = column(i / kUnitVectors % 2), row = i / kUnitVectors / 2;
        if (i < kCopies && first_unit + part < D && columns[c].runs(walk.t)) {
          copy_async(&shared.inputs[stage][row][c][part],
                     Pass::input(p, columns[c], head, row, walk.t) + first_unit + part);
        }
      }
      const Column& to = columns[column(lane() % 2)];
      if (lane() < 2 * kGates && first_unit < D && to.runs(walk.t)) {
        const unsigned panel = (unsigned(to.row) + walk.t) * kGates + lane() / 2;
        prefetch_l2(Pass::medium(p) + uint64_t(panel) * range.panel + head * D + first_unit);
      }
    }
    copy_commit();
  }

  DEVICE void step(const Walk& walk, int stage) {
    const Column& column = shared.columns[walk.tile][this->column()];
    const Operand operand = Pass::template operand<kMarked>(p, {column, p}, walk.t);
    const Spot spot{unsigned(column.row) + walk.t, range.panel, at(), operand.flags,
                    unit() < D && (operand.flags & kRuns)};
    float* states = &shared.carried[walk.tile][0][place()];
    const IO* inputs = &shared.inputs[stage][0][this->column()][lane() % 16];
    const auto prepared = Pass::prepare(p, spot, inputs, bias, states);

    const int buffer = kHalves == 2 ? half() : item % 2;
    barrier_wait<kProducts + kCells>(kFilled + buffer);
    const int slot = this->column() * Shared<Pass>::kColumnSlots + lane() % 16;
    typename Shared<Pass>::Sums sums[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sums[w] = shared.partials[buffer][w][slot];
#pragma unroll
    for (int half = kWarps / 2; half > 0; half /= 2) {
#pragma unroll
      for (int w = 0; w < half; ++w) sums[w] = sums[w] + sums[w + half];
    }
    __syncwarp();
    if (lane() == 0) mbarrier_arrive(shared.emptied[buffer]);
    if constexpr (kSplit > 1) exchange(sums[0].sum);
    Pass::cell(p, spot, prepared, sums[0].sum, bias, states);
  }

  // Sums of the units of every block of the cluster go there; ours are added in the order of
  // blocks. Who sends for the second next step has received all of the next one, and so knows that
  // the inbox of this step is read.
  DEVICE void exchange(float* sums) {
    const int buffer = own_item % 2, rank = this->rank();
    uint64_t& received = shared.received[half()][buffer];
    auto& inbox = shared.inbox[half()][buffer];
    if (place() == 0) mbarrier_expect(received, (kSplit - 1) * kCells * 4);
    float own = 0.0f;
#pragma unroll
    for (int to = 0; to < kSplit; ++to) {
      if (to == rank) {
        own = sums[to];
      } else {
        send(address_in(shared_address(&inbox[rank][place()]), to),
             address_in(shared_address(&received), to), __float_as_uint(sums[to]));
      }
    }
    mbarrier_wait(received, own_item / 2 % 2);
    float sum = 0.0f;
#pragma unroll
    for (int from = 0; from < kSplit; ++from) sum += from == rank ? own : inbox[from][place()];
    sums[0] = sum;
    ++own_item;
  }

  DEVICE void end_round() {
    for (int tile = 0; tile < tiles; ++tile) {
      if (!has_cell(tile) || unit() >= D || sequence(tile, column()) >= p.S) continue;
      const int64_t to = shared.columns[tile][column()].index * p.N * D + at();
#pragma unroll
      for (int k = 0; k < kStates; ++k) {
        Pass::last_state(p, k, to, shared.carried[tile][k][place()]);
      }
    }
    if constexpr (Pass::kDescends) {
      for (int i = thread(); i < tiles * kShape.sums * kUnits; i += kAll) {
        const int u = i % kUnits, row = i / kUnits % kShape.sums, tile = i / kUnits / kShape.sums;
        const float* of_unit = &shared.carried[tile][kStates + row][u];
        float sum = 0.0f;
        for (int c = 0; c < kColumns; ++c) sum += of_unit[c % 4 * 32 + c / 4 * 16];
        const int64_t to = (sequence(tile, 0) / kColumns * kShape.sums + row) * p.N + head;
        if (first_unit + u < D) {
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

}  // namespace flashcell::cuda::chip
