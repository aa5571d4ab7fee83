// The product warps of the whole-chip engine. They split the depth: what a warp polls are its
// operands, straight from L2 to the matrix instruction. Operands of the next step, or of the next
// tile, are asked for as soon as the registers of the ones before are free.
#pragma once
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
  static constexpr int kChains = kRows >= 3 ? 1 : kRows == 2 ? 2 : 4;  // mma has a latency
  static constexpr int kHalves = cell_halves(kShape, kBlocks, kMarked);
  static constexpr int kEveryone = kProducts + kHalves * kCells;
  static constexpr bool kExact = is_exact(kBlocks, kMarked);

  struct Look {  // at the operand of the lane's column
    const IO* from;
    int polled;            // blocks
    const float* initial;  // null when no column of the warp starts from one
    bool starts;           // this column does
  };

  uint32_t weight[kHeld][kRows][2][4];  // [chunk][row tile][mma step]
  uint32_t words[kAhead][4];
  const IO* operands;     // of the lane in row 0
  unsigned parities = 0;  // of the uses of the buffers of partial sums

  DEVICE int warp() const { return int(threadIdx.x / 32); }
  DEVICE int depth() const { return (warp() * 4 + lane() % 4) * kVector; }
  DEVICE bool present(int chunk) const { return kExact || chunk / kPanels < range.depth_blocks; }

  DEVICE Product(const Block<Pass>& block)
      : Block<Pass>(block),
        operands(Pass::medium(p) + (this->first_panel() * p.N + head) * D + depth()) {}

  DEVICE void run() {
    load_weight();
    this->rounds([&](int, int tiles) {
      barrier_wait<kEveryone>(kRound);  // the round before is over
      barrier_wait<kEveryone>(kRound);
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
    const int end = this->end(tiles);
    const bool patient = tiles <= 2;
    Walk at = this->start(tiles);
    Look now = look(at, end);
#pragma unroll
    for (int chunk = 0; chunk < kAhead; ++chunk) {
      words[chunk][0] = words[chunk][1] = words[chunk][2] = words[chunk][3] = 0;
    }
    ask(0, now);
    while (at.t != end) {
      float sums[kChains][kRows][4] = {};
#pragma unroll
      for (int first = 0; first < kChunks; first += kAhead) {
        await(first, now);
        multiply(sums, first);
        if (first + kAhead < kChunks) ask(first + kAhead, now);
      }
      const auto go_on = [&] { at = this->following(at, tiles, end), now = look(at, end); };
      const int tile = at.tile;
      if (!patient) {
        go_on();
        ask(0, now);
      }
      hand_over(sums, tile);
      if (patient) {
        go_on();
        if (at.t != end) wait_for_ours(at);
        ask(0, now);
      }
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

  DEVICE Look look(const Walk& walk, int end) const {
    if (walk.t == end) return {operands, 0, nullptr, false};
    const Column& column = shared.columns[walk.tile][lane() / 4];
    const Operand operand = Pass::template operand<kMarked>(p, {column, p}, walk.t);
    const unsigned row = unsigned(column.row) + operand.step;
    const int blocks = (max(D - depth(), 0) + kBlockDepth - 1) / kBlockDepth;
    Look look{operands + uint64_t(row) * (Pass::kGates * range.panel),
              operand.flags & kPolls ? blocks : 0, nullptr, bool(operand.flags & kInitial)};
    if constexpr (!Pass::kDescends) {
      if (p.initial != nullptr && (kMarked || walk.t == 0) && __any_sync(~0u, look.starts)) {
        look.initial = Pass::initial(p) + (column.index * p.N + head) * D + depth();
      }
    }
    return look;
  }

  DEVICE const IO* address(int chunk, const Look& look) const {
    return look.from + uint64_t(chunk % kPanels) * range.panel + chunk / kPanels * kBlockDepth;
  }

  // For kAhead chunks from the first on.
  DEVICE void ask(int first, const Look& look) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int chunk = first + i;
      if (present(chunk)) request(words[i], address(chunk, look), chunk / kPanels < look.polled);
    }
    if constexpr (!Pass::kDescends) {
      if (look.initial == nullptr) return;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int from = (first + i) * kBlockDepth;
        if (look.starts && depth() + from < D) convert(words[i], look.initial + from);
      }
    }
  }

  // What is late is asked for again, all at once.
  DEVICE void await(int first, const Look& look) {
    for (;;) {
      bool late = false;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) late |= unwritten(words[i]);
      if (!__any_sync(~0u, late)) return;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        request(words[i], address(first + i, look), unwritten(words[i]));
      }
    }
  }

  DEVICE static void convert(uint32_t (&words)[4], const float* from) {
    constexpr int kWord = Lane<IO>::kWord;
#pragma unroll
    for (int i = 0; i < kVector; i += 2) {
      const auto pair = Pair<IO>::of(from[i], from[i + 1]);
#pragma unroll
      for (int w = 0; w < 2 / kWord; ++w) {
        words[i / kWord + w] = min(pair.word[w], kUnwritten - 1);
      }
    }
  }

  DEVICE void multiply(float (&sums)[kChains][kRows][4], int first) {
#pragma unroll
    for (int i = 0; i < 2 * kAhead; ++i) {
      const int chunk = first + i / 2, j = i % 2;
      const uint32_t low = operand<IO>(words[i / 2][2 * j]);
      const uint32_t high = operand<IO>(words[i / 2][2 * j + 1]);
      if (!present(chunk)) continue;
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        float (&sum)[4] = sums[i % kChains][m];
        if (chunk < kHeld) {
          mma<IO>(sum, weight[min(chunk, kHeld - 1)][m][j], low, high);
        } else {
          const uint4 a = shared_weight(chunk, m, j);
          mma<IO>(sum, {a.x, a.y, a.z, a.w}, low, high);
        }
      }
    }
  }

  // With two halves of cell warps each has its buffer.
  DEVICE void hand_over(const float (&sums)[kChains][kRows][4], int tile) {
    using Sums = typename Shared<Pass>::Sums;
    const int buffer = kHalves == 2 ? tile % 2 : parities >> 2 & 1, r = lane() / 4, q = lane() % 4;
    Sums* to = &shared.partials[buffer][warp()][2 * q * Shared<Pass>::kColumnSlots + r];
    mbarrier_wait(shared.emptied[buffer], ~parities >> buffer & 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Sums slot{};
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        slot.sum[m] = sums[0][m][i];
#pragma unroll
        for (int chain = 1; chain < kChains; ++chain) slot.sum[m] += sums[chain][m][i];
      }
      to[i % 2 * Shared<Pass>::kColumnSlots + i / 2 * 8] = slot;
    }
    barrier_arrive<kProducts + kCells>(kFilled + buffer);
    parities ^= 4 | 1 << buffer;
  }
};

}  // namespace flashcell::cuda::chip
