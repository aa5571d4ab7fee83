// The product warps of the whole-chip engine. They split the depth: what a warp polls are its
// operands, straight from L2 to the matrix instruction. Operands of the next step, or of the next
// tile, are asked for as soon as the registers of the ones before are free.
#pragma once
#include <cstddef>

#include "chip_block.cuh"

namespace flashcell::cuda::chip {

// kBlocks: of the depth, at most. Exact ones need no look at how many there are.
template <typename Pass, int kBlocks, bool kMarked>
struct Product : Block<Pass> {
  using IO = typename Pass::IO;
  using Block<Pass>::p, Block<Pass>::range, Block<Pass>::shared, Block<Pass>::D;
  using Block<Pass>::head, Block<Pass>::first_unit, Block<Pass>::lane;
  static constexpr Shape kShape = Pass::kShape;
  static constexpr int kRows = Pass::kRows, kPanels = Pass::kPanels, kSplit = Pass::kSplit;
  static constexpr int kVector = Lane<IO>::kVector;
  static constexpr int kBlockDepth = kWarps * 4 * kVector;  // one chunk for every warp
  static constexpr int kChunks = kBlocks * kPanels, kAhead = chunks_ahead(kShape, kBlocks, kMarked);
  static constexpr int kHolds = held_chunks(kShape), kHeld = kChunks < kHolds ? kChunks : kHolds;
  static constexpr int kWide = Pass::kWide;
  static constexpr int kChains = kRows * kWide >= 3 ? 1 : 4 / (kRows * kWide);  // mma has a latency
  // Chunks asked for together, and tiles a group alternates between without asking ahead: chosen by
  // measurement.
  static constexpr int kRefill = kWide > 1 ? 1 : kAhead, kPatience = 2;
  static constexpr int kHalves = cell_halves(kShape, kBlocks, kMarked);
  static constexpr bool kExact = is_exact(kBlocks, kMarked);
  static constexpr int kAll = kProducts + kHalves * kCells;

  static_assert(kWide == 1 || !kMarked);
  struct Look {             // at the operands of the lane's columns
    const IO* from[kWide];  // in the medium, or in the initial states
    int polled[kWide];      // blocks
  };

  uint32_t weight[kHeld][kRows][2][4];  // [chunk][row tile][mma step]
  uint32_t words[kAhead][kWide][4];
  const IO* const medium;  // the lane's operands in its first row
  const int blocks;        // of the depth, with operands of the lane
  const uint32_t columns, sums_here;
  unsigned parities = 0;  // of the uses of the buffers of partial sums

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
    this->rounds([&](int, int tiles) {
      barrier_meet<kAll>(kRound);  // the round before is over
      barrier_meet<kAll>(kRound);
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
      for (int m = 0; m < kRows; ++m) {
        const int row = (kSplit > 1 ? this->cluster_unit() + m * kUnits : first_unit) + lane() / 4;
        uint4 low{}, high{};
        if (from < D && row < D) low = Pass::weight(p, head, m, panel, row, from);
        if (from < D && row + 8 < D) high = Pass::weight(p, head, m, panel, row + 8, from);
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

  DEVICE uint4& shared_weight(int chunk, int m, int j) const {
    uint4* weights = reinterpret_cast<uint4*>(&shared + 1);
    return weights[(((chunk - kHolds) * kRows + m) * 2 + j) * kProducts + threadIdx.x];
  }

  DEVICE void run_round(int tiles) {
    const Route route = this->route(tiles);
    const bool eager = tiles > kPatience;
    Walk at = this->first(route);
    Look now = look(at, route.end);
#pragma unroll
    for (int i = 0; i < kAhead * kWide; ++i) {
      uint32_t (&zero)[4] = words[i / kWide][i % kWide];
      zero[0] = zero[1] = zero[2] = zero[3] = 0;
    }
    ask<kAhead>(0, 0, now);
    while (at.t != route.end) {
      float sums[kWide][kChains][kRows][4] = {};
      const int tile = at.tile;
      Look next = now;
      const auto go_on = [&] { at = this->following(at, route), next = look(at, route.end); };
#pragma unroll
      for (int first = 0; first < kChunks; first += kRefill) {
        const int free = first % kAhead, refill = first + kAhead;
        if (free == 0) await(first, now);
        multiply(sums, free, first);
        if (refill < kChunks) {
          ask<kRefill>(free, refill, now);
        } else if (eager) {
          if (refill == kChunks) go_on();
          ask<kRefill>(free, refill - kChunks, next);
        }
      }
      hand_over(sums, tile);
      if (!eager) {
        go_on();
        if (at.t != route.end) wait_for_ours(at);
        if (!Pass::kDescends && tiles == 1 && range.pause > 0) pause();
        ask<kAhead>(0, 0, next);
      }
      now = next;
    }
  }

  // With little else to do the other blocks are as far as this one: asking before our own part is
  // out would only keep L2 busy.
  DEVICE void wait_for_ours(const Walk& walk) const {
    const volatile int& step = shared.published[walk.tile][lane() / 4 % kCellWarps];
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

  using Sums = typename Shared<Pass>::Sums;
  using ItemSums = float[kWide][kChains][kRows][4];

  DEVICE void multiply(ItemSums& sums, int slot, int first) {
#pragma unroll
    for (int i = 0; i < 2 * kRefill; ++i) {
      const int chunk = first + i / 2, j = i % 2;
      uint32_t low[kWide], high[kWide];
#pragma unroll
      for (int side = 0; side < kWide; ++side) {
        low[side] = operand<IO>(words[slot + i / 2][side][2 * j]);
        high[side] = operand<IO>(words[slot + i / 2][side][2 * j + 1]);
      }
      if (!present(chunk)) continue;
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        uint32_t a[4];
        if (chunk >= kHeld) {
          const uint4 of_chunk = shared_weight(chunk, m, j);
          a[0] = of_chunk.x, a[1] = of_chunk.y, a[2] = of_chunk.z, a[3] = of_chunk.w;
        }
#pragma unroll
        for (int side = 0; side < kWide; ++side) {
          float (&sum)[4] = sums[side][i % kChains][m];
          if (chunk < kHeld) {
            mma<IO>(sum, weight[min(chunk, kHeld - 1)][m][j], low[side], high[side]);
          } else {
            mma<IO>(sum, a, low[side], high[side]);
          }
        }
      }
    }
  }

  // With two halves of cell warps each has its buffer.
  DEVICE void hand_over(const ItemSums& sums, int tile) {
    constexpr int kBufferBytes = sizeof(shared.partials[0]), kSlotBytes = sizeof(Sums);
    const int buffer = kHalves == 2 ? tile % 2 : parities >> 2 & 1;
    const uint32_t to = sums_here + buffer * kBufferBytes;
    mbarrier_wait(shared.emptied[buffer], ~parities >> buffer & 1);
#pragma unroll
    for (int i = 0; i < 4 * kWide; ++i) {
      const int side = i / 4, row = i / 2 % 2 * 8, column = i % 2 + 8 * side;
      Sums slot{};
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        slot.sum[m] = sums[side][0][m][i % 4];
#pragma unroll
        for (int chain = 1; chain < kChains; ++chain) slot.sum[m] += sums[side][chain][m][i % 4];
      }
      store_shared(to + (column * Shared<Pass>::kColumnSlots + row) * kSlotBytes, slot);
    }
    barrier_arrive<kProducts + kCells>(kFilled + buffer);
    parities ^= 4 | 1 << buffer;
  }
};

}  // namespace flashcell::cuda::chip
