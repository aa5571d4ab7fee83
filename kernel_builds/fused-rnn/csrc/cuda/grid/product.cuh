// The product warps of the grid engine. They split the depth: what a warp polls are its
// operands, straight from L2 to the matrix instruction. Operands of the next step, or of the next
// tile, are asked for as soon as the registers of the ones before are free.
#pragma once
#include <cstddef>

#include "block.cuh"

namespace flashcell::cuda::grid {

// kBlocks: of the depth, at most. Exact ones need no look at how many there are.
template <typename Pass, int kBlocks, bool kMarked>
struct Product : Block<Pass> {
  using IO = typename Pass::IO;
  using Block<Pass>::p, Block<Pass>::range, Block<Pass>::shared, Block<Pass>::D;
  using Block<Pass>::head, Block<Pass>::first_unit, Block<Pass>::lane;
  static constexpr Shape kShape = Pass::kShape;
  static constexpr int kRows = Pass::kRows, kPanels = Pass::kPanels, kSplit = Pass::kSplit;
  static constexpr int kVector = IoTraits<IO>::kVector;
  static constexpr int kBlockDepth = kWarps * 4 * kVector;  // one chunk for every warp
  static constexpr int kChunks = kBlocks * kPanels, kAhead = chunks_ahead(kShape, kBlocks, kMarked);
  static constexpr int kHolds = held_chunks(kShape), kHeld = kChunks < kHolds ? kChunks : kHolds;
  static constexpr int kWide = Pass::kWide, kUnits = kShape.units, kRowTiles = row_tiles(kShape);
  // Eights of units: a row's are a piece, half the height of the matrix instruction. The sums of
  // all units are made together, or those of one eight after the other, which takes fewer
  // registers but all operands at once.
  static constexpr int kEights = kUnits / 8, kPieces = kEights * kRows;
  static constexpr bool kByEights = kEights > 2 && kAhead == kChunks&& kRows % 2 == 0;
  static constexpr int kTogether = kByEights ? kRows / 2 : kRowTiles;           // row tiles
  static constexpr int kChains = kRows * kWide >= 3 ? 1 : 4 / (kRows * kWide);  // mma has a latency
  // Chunks asked for together, and tiles a group alternates between without asking ahead: chosen by
  // measurement.
  static constexpr int kRefill = kWide > 1 ? 1 : kAhead, kPatience = 2;
  static constexpr int kHalves = cell_halves(kShape, kBlocks, kMarked);
  static constexpr bool kExact = is_exact(kBlocks, kMarked);
  static constexpr int kCells = cell_threads(kShape),
                       kAll = kProducts + kHalves * kCells + fetch_threads(kShape);

  static_assert(kWide == 1 || !kMarked);
  struct Look {             // at the operands of the lane's columns
    const IO* from[kWide];  // in the medium, or in the initial states
    int polled[kWide];      // blocks
  };

  uint32_t weight[kHeld][kRowTiles][2][4];  // [chunk][row tile][mma step]
  uint32_t words[kAhead][kWide][4];
  const IO* const medium;  // the lane's operands in its first row
  const int blocks;        // of the depth, with operands of the lane
  const uint32_t columns, sums_here;
  unsigned parities = 0;  // of the uses of the buffers of partial sums
  int sequence = 0;       // of the lane's first column of the round's first tile

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
      named_barrier_sync_diverged<kAll>(kRound);  // the round before is over
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

  // The lane's row of a piece: eight units of a gate, or of a block of the cluster.
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
      // Here alone, not also before the loop: that would load into other registers, and the loop
      // would begin with moves, or with a wait for loads that are none of its own.
      if (!eager) ask<kAhead>(0, 0, now);
      const int tile = at.tile;
      Look next = now;
      const auto go_on = [&] { at = this->following(at, route), next = look(at, route.end); };
      int buffer = kEights > 2 ? empty_buffer(tile) : 0;  // while operands are on their way
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

  // With little else to do the other blocks are as far as this one: asking before our own part is
  // out would only keep L2 busy.
  DEVICE void wait_for_ours(const Walk& walk) const {
    const int warp = place_of(kUnits, lane() / 4, kUnits - 1) / 32;
    const volatile int& step = shared.published[walk.tile][warp];
    while (Pass::kDescends ? step > walk.t + 1 : step < walk.t - 1) {
    }
    __syncwarp();
  }

  // Nor is all of it there at once: who asks too early asks twice, and holds up what it waits for.
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
        const uint4 rows = load_shared(column);  // words of its index and of its row
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

  // For kCount chunks from `chunk` on, into the words of `slot` and those behind it.
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

  // What is late of kAhead chunks is asked for again, all at once.
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

  // kCount chunks, for the row tiles from `top` on.
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

  // With two halves of cell warps each has its buffer.
  DEVICE int empty_buffer(int tile) const {
    const int buffer = kHalves == 2 ? tile % 2 : parities >> 2 & 1;
    mbarrier_poll(shared.emptied[buffer], ~parities >> buffer & 1);
    return buffer;
  }

  // What the lane has of an eight of units: all rows of one of them, for two columns a side.
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
