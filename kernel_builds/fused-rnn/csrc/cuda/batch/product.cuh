// The copies into the ring of stages, and the matrix product out of it.
#pragma once
#include "common/cuda/ptx/bulk_copy.cuh"
#include "common/cuda/ptx/global_memory.cuh"
#include "common/cuda/ptx/prefetch.cuh"
#include "common/cuda/ptx/wgmma.cuh"
#include "position.cuh"

namespace flashcell::cuda::batch {

// A position in the ring. A stage holds the rows of the operand, then those of the weight; `full`
// and `empty` are its barriers. Behind the stages lie the states that stay in shared memory.
template <typename S>
struct Ring {
  static constexpr int kBytes = (S::kRows + S::kColumns) * kRowBytes, kStages = S::kStages;
  uint32_t memory;
  int index = 0, round = 0;

  DEVICE explicit Ring(uint32_t memory) : memory(memory) {}
  DEVICE uint32_t rows() const { return memory + index * kBytes; }
  DEVICE uint32_t columns() const { return rows() + S::kRows * kRowBytes; }
  DEVICE uint32_t states() const { return memory + kStages * kBytes; }
  DEVICE uint32_t full() const { return states() + S::kKeptBytes + index * 16; }
  DEVICE uint32_t empty() const { return full() + 8; }
  // The barrier at which a warpgroup waits for its turn.
  DEVICE uint32_t turn(int warpgroup) const {
    return states() + S::kKeptBytes + kStages * 16 + warpgroup * 8;
  }
  DEVICE void init() {
    for (int i = 0; i < 2; ++i) mbarrier_init(turn(i), kWarpgroup / 32);
    for (; index < kStages; ++index) {
      mbarrier_init(full(), 1), mbarrier_init(empty(), S::kWarpgroups * kWarpgroup / 32);
    }
  }
  DEVICE void advance() {
    if (++index == kStages) index = 0, ++round;
  }
  DEVICE void skip(int stages) {
    index += stages;
    round += index / kStages, index %= kStages;
  }
  DEVICE void release() const {  // reports that the warp has finished with the stage
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty());
  }
};

// One warp, which copies; its first lane waits and starts the copies. Between them the warp fetches
// what the cells read of the tile's rows into L2: prefetch(position, row, part) of a row's kParts.
template <typename S, typename Prefetch>
struct Copies {
  const SequenceParams& p;
  const Work& work;
  Ring<S> ring;
  Prefetch prefetch;

  DEVICE void run() {
    for_positions<S>(p, work, [&](const Position<S>& at) {
      if (at.has_product(work)) copy(at);
    });
  }

  DEVICE void copy(const Position<S>& at) {
    const int lane = threadIdx.x % 32;
    const char* operand = at.operand(work, at.t + 1);  // of step t - 1, with the same parity
    const int ahead = min(S::kStages, work.panels);
    Ring<S> early = ring;
    if (lane == 0) {
      for (int panel = 0; panel < ahead; ++panel) start(early, at, panel);
      const unsigned tiles = work.unit_tiles * S::kWarpgroups;
      if (at.t > 0) wait_acquired(at.published, at.t * tiles);
      fence_proxy_async_global();
    }
    int part = lane;
    const auto prefetch_next = [&] {
      if (part < S::kRows * S::kParts) prefetch(at, part / S::kParts, part % S::kParts);
      part += 32;
    };
    for (int panel = 0; panel < work.panels; ++panel) {
      if (lane == 0) {
        if (panel >= ahead) start(early, at, panel);
        bulk_copy(ring.rows(), operand + panel * at.panel_bytes(work), S::kRows * kRowBytes,
                  ring.full());
      }
      ring.advance();
      __syncwarp();
      if (panel >= ahead - 1) prefetch_next();  // what the product waits for comes first
    }
    while (part < S::kRows * S::kParts) prefetch_next();
  }

  // Begins a stage with the weight, which does not wait for the operand.
  DEVICE void start(Ring<S>& stage, const Position<S>& at, int panel) const {
    constexpr int kBytes = S::kColumns * kRowBytes;
    mbarrier_wait(stage.empty(), stage.round - 1);
    mbarrier_arrive_expect_tx(stage.full(), Ring<S>::kBytes);
    bulk_copy(stage.columns(), at.weight + int64_t(panel) * kBytes, kBytes, stage.full());
    stage.advance();
  }
};

// Fetches a part of a row's units of the tile into L2.
template <typename S>
DEVICE void prefetch_units(const Work& work, const Position<S>& at, const void* from, int part) {
  constexpr int kSector = 32, kUnits = kSector / S::kIo;
#pragma unroll
  for (int i = 0; i < kPartBytes / kSector; ++i) {
    const int unit = part * (kPartBytes / S::kIo) + i * kUnits;
    if (unit < S::kUnits && at.unit0 + unit < work.D) {
      prefetch_l2(static_cast<const char*>(from) + unit * S::kIo);
    }
  }
}

// The order of warpgroups that take turns. One must not wait for a stage before the other has seen
// the stage's previous phase: it would take the phase before that for its own.
template <typename S>
struct Turns {
  Ring<S> ring;
  int own;        // 0 for the warpgroup of the first tile, 1 for the other
  int tiles = 0;  // that the warpgroup has had

  DEVICE void wait() const {
    if (!S::kTurns || (own == 0 && tiles == 0)) return;
    mbarrier_wait(ring.turn(own), tiles - 1 + own);
  }
  DEVICE void pass() {
    if (!S::kTurns) return;
    ++tiles;
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(ring.turn(1 - own));
  }
};

// A warpgroup's product of a tile.
template <typename S>
DEVICE void multiply(typename S::Sums& sums, Ring<S>& ring, Turns<S>& turns, int panels) {
  turns.wait();
  const int own = Position<S>::own_blocks() * 64 * kRowBytes;
  wgmma_fence(sums[0], sums[S::kBlocks - 1]);
  Ring<S> before = ring;
  for (int panel = 0; panel < panels; ++panel) {
    mbarrier_wait(ring.full(), ring.round);
    const SharedOperand<Major::kDepth> rows(ring.rows() + own), columns(ring.columns());
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // the depth is padded with zeros
#pragma unroll
      for (int m = 0; m < S::kBlocks; ++m) {
        const auto left = rows.at(m * 64 * kRowBytes).step(k), right = columns.step(k);
        if constexpr (S::kIo == 4) {
          wgmma_tf32(sums[m], left, right);
        } else {
          wgmma<typename S::IO>(sums[m], left, right);
        }
      }
    }
    wgmma_commit();
    if (panel > 0) {
      wgmma_wait<1>();
      before.release(), before.advance();
    }
    ring.advance();
  }
  turns.pass();
  wgmma_wait<0>(sums[0], sums[S::kBlocks - 1]);
  if (panels > 0) before.release();
}

}  // namespace flashcell::cuda::batch
