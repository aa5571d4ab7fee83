// The product warps of the grid engine. They split the depth of the product. A warp polls its own
// operands and passes them straight from L2 to the matrix instruction. It requests the operands of
// the next step, or of the next tile, as soon as registers are free.
#pragma once
#include <cstddef>

#include "block.cuh"

namespace flashcell::cuda::grid {

// kBlocks is the most blocks of the depth; if it is exact, no block has to be checked for
// existence.
template <typename Pass, int kBlocks, bool kMarked>
struct Product : Block<Pass> {
  using IO = typename Pass::IO;
  using Block<Pass>::p, Block<Pass>::range, Block<Pass>::shared, Block<Pass>::D;
  using Block<Pass>::head, Block<Pass>::first_unit, Block<Pass>::lane;
  static constexpr Shape kShape = Pass::kShape;
  static constexpr int kRows = Pass::kRows, kPanels = Pass::kPanels, kSplit = Pass::kSplit;
  static constexpr int kVector = IoTraits<IO>::kVector;
  // A block of the depth is one chunk for every warp.
  static constexpr int kBlockDepth = kWarps * 4 * kVector;
  static constexpr int kChunks = kBlocks * kPanels, kAhead = chunks_ahead(kShape, kBlocks, kMarked);
  static constexpr int kHolds = held_chunks(kShape), kHeld = kChunks < kHolds ? kChunks : kHolds;
  static constexpr int kWide = Pass::kWide, kUnits = kShape.units, kRowTiles = row_tiles(kShape);
  // A piece is eight units of one row of the product, half the height of the matrix instruction.
  // The sums of all units are computed together or, with kByEights, eight units at a time, which
  // takes fewer registers but needs all operands at once.
  static constexpr int kEights = kUnits / 8, kPieces = kEights * kRows;
  static constexpr bool kByEights = kEights > 2 && kAhead == kChunks&& kRows % 2 == 0;
  // Row tiles computed together.
  static constexpr int kTogether = kByEights ? kRows / 2 : kRowTiles;
  // Independent chains of sums, to hide the latency of mma.
  static constexpr int kChains = kRows * kWide >= 3 ? 1 : 4 / (kRows * kWide);
  // kRefill is the number of chunks requested together. With up to kPatience tiles a group requests
  // nothing ahead. Both were chosen by measurement.
  static constexpr int kRefill = kWide > 1 ? 1 : kAhead, kPatience = 2;
  static constexpr int kHalves = cell_halves(kShape, kBlocks, kMarked);
  static constexpr bool kExact = is_exact(kBlocks, kMarked);
  static constexpr int kCells = cell_threads(kShape),
                       kAll = kProducts + kHalves * kCells + fetch_threads(kShape);

  static_assert(kWide == 1 || !kMarked);
  struct Look {             // where the operands of the lane's columns are
    const IO* from[kWide];  // points into the exchange tensor, or the initial states
    int polled[kWide];      // number of blocks of the depth to poll
  };

  uint32_t weight[kHeld][kRowTiles][2][4];  // [chunk][row tile][mma step]
  uint32_t words[kAhead][kWide][4];
  const IO* const medium;  // the lane's operands in row 0 of the exchange tensor
  const int blocks;        // blocks of the depth in which the lane has operands
  const uint32_t columns, sums_here;
  unsigned parities = 0;  // parities of the buffers of partial sums, and which is next
  int sequence = 0;       // index of the lane's first column in the round's first tile

  DEVICE int warp() const { return int(threadIdx.x / 32); }
  DEVICE int depth() const { return (warp() * 4 + lane() % 4) * kVector; }
  DEVICE bool present(int chunk) const { return kExact || chunk / kPanels < range.depth_blocks; }

  DEVICE Product(const Block<Pass>& block)
      : Block<Pass>(block),
        medium(Pass::medium(p) + (this->first_panel() * p.N + head) * D + depth()),
        blocks((max(D - depth(), 0) + kBlockDepth - 1) / kBlockDepth),
        columns(shared_address(&shared.columns[0][lane() / 4])),
        sums_here(shared_address(
            &shared
                 .partials[0][warp()][lane() % 4 * 2 * Shared<Pass>::kColumnSlots + lane() / 4])) {}

  DEVICE void run() {
    load_weight();
    this->rounds([&](int first_tile, int tiles) {
      named_barrier_sync_diverged<kAll>(kRound);  // wait for the end of the round before
      named_barrier_sync_diverged<kAll>(kRound);
      sequence = first_tile * Block<Pass>::kColumns + lane() / 4;
      run_round(tiles);
    });
  }

  DEVICE void load_weight() {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int panel = this->first_panel() + chunk % kPanels,
                from = depth() + chunk / kPanels * kBlockDepth;
      if (!present(chunk)) continue;
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const uint4 low = piece(2 * m, panel, from), high = piece(2 * m + 1, panel, from);
        const uint32_t of[8] = {low.x, high.x, low.y, high.y, low.z, high.z, low.w, high.w};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          uint32_t a[4];
#pragma unroll
          for (int w = 0; w < 4; ++w) a[w] = operand<IO>(of[j * 4 + w]);
          if (chunk >= kHeld) {
            shared_weight(chunk, m, j) = make_uint4(a[0], a[1], a[2], a[3]);
          } else {
#pragma unroll
            for (int w = 0; w < 4; ++w) weight[min(chunk, kHeld - 1)][m][j][w] = keep(a[w]);
          }
        }
      }
    }
  }

  // Loads the lane's row of a piece: eight units of a gate, or of one block of the cluster.
  DEVICE uint4 piece(int i, int panel, int from) const {
    const int row = i % kRows, unit = i / kRows * 8 + lane() / 4;
    const int to = unit + (kSplit > 1 ? this->cluster_unit() + row * kUnits : first_unit);
    if (i >= kPieces || from >= D || to >= D) return uint4{};
    return Pass::weight(p, head, row, panel, to, from);
  }

  DEVICE uint4& shared_weight(int chunk, int m, int j) const {
    uint4* weights = reinterpret_cast<uint4*>(&shared + 1);
    return weights[(((chunk - kHolds) * kRowTiles + m) * 2 + j) * kProducts + threadIdx.x];
  }

  DEVICE void run_round(int tiles) {
    const Route route = this->route(tiles);
    const bool eager = !kByEights && tiles > kPatience;
    Walk at = this->first(route);
    Look now = look(at, route.end);
#pragma unroll
    for (int i = 0; i < kAhead * kWide; ++i) {
      uint32_t (&zero)[4] = words[i / kWide][i % kWide];
      zero[0] = zero[1] = zero[2] = zero[3] = 0;
    }
    if (eager) ask<kAhead>(0, 0, now);
    while (at.t != route.end) {
      // Requested here only, not before the loop as well: the compiler would use other registers
      // there, and the loop would begin with moves, or wait for unrelated loads.
      if (!eager) ask<kAhead>(0, 0, now);
      const int tile = at.tile;
      Look next = now;
      const auto go_on = [&] { at = this->following(at, route), next = look(at, route.end); };
      // Waits while the operands are on their way.
      int buffer = kEights > 2 ? empty_buffer(tile) : 0;
      if (kEights > 2 && !eager) go_on();
      if constexpr (kByEights) {
        await(0, now);
#pragma unroll
        for (int eight = 0; eight < kEights; ++eight) {
          Sums sums{};
          multiply<kAhead>(sums, 0, 0, eight * kTogether);
          store(buffer, sums, eight);
        }
      } else {
        Sums sums{};
#pragma unroll
        for (int first = 0; first < kChunks; first += kRefill) {
          const int free = first % kAhead, refill = first + kAhead;
          if (free == 0) await(first, now);
          multiply<kRefill>(sums, free, first);
          if (refill < kChunks) {
            ask<kRefill>(free, refill, now);
          } else if (eager) {
            if (refill == kChunks) go_on();
            ask<kRefill>(free, refill - kChunks, next);
          }
        }
        if (kEights == 2) buffer = empty_buffer(tile);
#pragma unroll
        for (int eight = 0; eight < kEights; ++eight) store(buffer, sums, eight);
      }
      hand_over(buffer);
      if (!eager) {
        if (kEights == 2) go_on();
        if (at.t != route.end) wait_for_ours(at);
        if (!Pass::kDescends && tiles == 1 && range.pause > 0) pause();
      }
      now = next;
    }
  }

  // Waits until this block has published its own part of the next operand. The other blocks are
  // about as far as this one, so polling earlier would only load L2.
  DEVICE void wait_for_ours(const Walk& walk) const {
    const int warp = place_of(kUnits, lane() / 4, kUnits - 1) / 32;
    const volatile int& step = shared.published[walk.tile][warp];
    while (Pass::kDescends ? step > walk.t + 1 : step < walk.t - 1) {
    }
    __syncwarp();
  }

  // Waits a little longer: the other blocks' parts are not there at once, and polling too early
  // costs a second poll and delays the data.
  DEVICE void pause() const {
    const unsigned begin = unsigned(clock());
    while (unsigned(clock()) - begin < range.pause) {
    }
  }

  DEVICE Look look(const Walk& walk, int end) const {
    Look look{};
    if (walk.t == end) return look;
    if (!kMarked && this->whole() && walk.t != (Pass::kDescends ? int(p.T) - 1 : 0)) {
#pragma unroll
      for (int side = 0; side < kWide; ++side) {
        const int s = sequence + (walk.tile * range.groups * kWide + side) * 8;
        const unsigned step = unsigned(walk.t) + unsigned(Pass::kDescends ? 1 : -1);
        const unsigned row = unsigned(s) * unsigned(p.T) + step;
        look.from[side] = medium + uint64_t(row) * (Pass::kGates * range.panel);
        look.polled[side] = s < int(p.S) ? blocks : 0;
      }
      return look;
    }
#pragma unroll
    for (int side = 0; side < kWide; ++side) {
      bool starts, polls;
      unsigned row;
      if constexpr (kMarked) {
        const Column& column = shared.columns[walk.tile][lane() / 4 + 8 * side];
        const Operand operand = Pass::template operand<kMarked>(p, {column, p}, walk.t);
        starts = operand.flags & kInitial, polls = operand.flags & (kPolls | kInitial);
        row = unsigned(starts ? column.index : column.row + operand.step);
      } else {
        const uint32_t column = columns + (walk.tile * 8 * kWide + 8 * side) * kColumnBytes;
        const uint4 rows = load_shared(column);  // words of Column::index and Column::row
        const int length = int(load_word(column + offsetof(Column, length)));
        starts = !Pass::kDescends && walk.t == 0;
        const int step = walk.t + (Pass::kDescends ? 1 : -1);
        polls = max(step, walk.t) < length;
        if constexpr (!Pass::kDescends) polls &= !starts || p.initial != nullptr;
        row = starts ? rows.x : rows.z + unsigned(step);
      }
      look.from[side] = medium + uint64_t(row) * (Pass::kGates * range.panel);
      if (starts) look.from[side] += range.initial;
      look.polled[side] = polls ? blocks : 0;
    }
    return look;
  }

  DEVICE const IO* address(int chunk, const Look& look, int side) const {
    return look.from[side] + uint64_t(chunk % kPanels) * range.panel +
           chunk / kPanels * kBlockDepth;
  }

  // Requests kCount chunks from `chunk` on, into `words` from `slot` on.
  template <int kCount>
  DEVICE void ask(int slot, int chunk, const Look& look) {
#pragma unroll
    for (int i = 0; i < kCount * kWide; ++i) {
      const int c = chunk + i / kWide, side = i % kWide;
      if (!present(c)) continue;
      request(words[slot + i / kWide][side], address(c, look, side),
              c / kPanels < look.polled[side]);
    }
  }

  // Waits for kAhead chunks: all that are missing are requested again together.
  DEVICE void await(int first, const Look& look) {
    for (;;) {
      bool late = false;
#pragma unroll
      for (int i = 0; i < kAhead * kWide; ++i) late |= unwritten(words[i / kWide][i % kWide]);
      if (!__any_sync(~0u, late)) return;
#pragma unroll
      for (int i = 0; i < kAhead * kWide; ++i) {
        uint32_t (&of_chunk)[4] = words[i / kWide][i % kWide];
        request(of_chunk, address(first + i / kWide, look, i % kWide), unwritten(of_chunk));
      }
    }
  }

  struct Sums {
    float of[kWide][kChains][kTogether][4];
  };

  // Multiplies kCount chunks, for the row tiles from `top` on.
  template <int kCount>
  DEVICE void multiply(Sums& sums, int slot, int first, int top = 0) {
#pragma unroll
    for (int i = 0; i < 2 * kCount; ++i) {
      const int chunk = first + i / 2, j = i % 2;
      uint32_t low[kWide], high[kWide];
#pragma unroll
      for (int side = 0; side < kWide; ++side) {
        low[side] = operand<IO>(words[slot + i / 2][side][2 * j]);
        high[side] = operand<IO>(words[slot + i / 2][side][2 * j + 1]);
      }
      if (!present(chunk)) continue;
#pragma unroll
      for (int m = 0; m < kTogether; ++m) {
        uint32_t a[4];
        if (chunk >= kHeld) {
          const uint4 of_chunk = shared_weight(chunk, top + m, j);
          a[0] = of_chunk.x, a[1] = of_chunk.y, a[2] = of_chunk.z, a[3] = of_chunk.w;
        }
#pragma unroll
        for (int side = 0; side < kWide; ++side) {
          float (&sum)[4] = sums.of[side][i % kChains][m];
          if (chunk < kHeld) {
            mma<IO>(sum, weight[min(chunk, kHeld - 1)][top + m][j], low[side], high[side]);
          } else {
            mma<IO>(sum, a, low[side], high[side]);
          }
        }
      }
    }
  }

  // Waits until a buffer of partial sums is empty, and returns it. With two halves of cell warps,
  // each half has its own buffer.
  DEVICE int empty_buffer(int tile) const {
    const int buffer = kHalves == 2 ? tile % 2 : parities >> 2 & 1;
    mbarrier_poll(shared.emptied[buffer], ~parities >> buffer & 1);
    return buffer;
  }

  // Stores the lane's sums of eight units: all rows of one of them, for two columns of each side.
  DEVICE void store(int buffer, const Sums& sums, int eight) const {
    using Slot = typename Shared<Pass>::Sums;
    const uint32_t to = sums_here + buffer * sizeof(shared.partials[0]);
#pragma unroll
    for (int i = 0; i < 2 * kWide; ++i) {
      const int side = i / 2, column = i % 2 + 8 * side;
      Slot slot{};
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const int piece = (kByEights ? 0 : eight * kRows) + row, word = piece % 2 * 2 + i % 2;
        slot.sum[row] = sums.of[side][0][piece / 2][word];
#pragma unroll
        for (int chain = 1; chain < kChains; ++chain)
          slot.sum[row] += sums.of[side][chain][piece / 2][word];
      }
      store_shared(to + (column * Shared<Pass>::kColumnSlots + eight * 8) * sizeof(Slot), slot);
    }
  }

  DEVICE void hand_over(int buffer) {
    named_barrier_arrive<kProducts + kCells>(kFilled + buffer);
    parities ^= 4 | 1 << buffer;
  }
};

}  // namespace flashcell::cuda::grid
