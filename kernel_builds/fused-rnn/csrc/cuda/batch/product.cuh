// The copies into the ring of stages, and the matrix product out of it.
#pragma once
#include "common/cuda/ptx/bulk_copy.cuh"
#include "common/cuda/ptx/global_memory.cuh"
#include "common/cuda/ptx/prefetch.cuh"
#include "common/cuda/ptx/wgmma.cuh"
#include "position.cuh"

namespace flashcell::cuda::batch {

// A position in the ring. A stage holds the rows of the operand, then those of the weight, if they
// are not resident; `full` and `empty` are its barriers. Behind the stages lie the states that stay
// in shared memory, and before them resident weights.
template <typename S>
struct Ring {
  static constexpr int kBytes = S::kTile.stage_bytes(S::G);
  static constexpr int kPanelBytes = S::kColumns * kRowBytes;  // of the weight
  uint32_t memory;
  int stages;
  int index = 0, round = 0;

  DEVICE Ring(uint32_t memory, const Work& work)
      : memory(S::kResident ? memory + work.panels * kPanelBytes : memory),
        stages(S::kResident ? work.stages : S::kStages) {}
  DEVICE int count() const { return S::kResident ? stages : S::kStages; }
  DEVICE uint32_t rows() const { return memory + index * kBytes; }
  DEVICE uint32_t columns(int panel, int panels) const {
    return S::kResident ? memory - (panels - panel) * kPanelBytes : rows() + S::kRows * kRowBytes;
  }
  DEVICE uint32_t states() const { return memory + count() * kBytes; }
  DEVICE uint32_t full() const { return states() + S::kKeptBytes + index * 16; }
  DEVICE uint32_t empty() const { return full() + 8; }
  // The barrier at which a warpgroup waits for its turn.
  DEVICE uint32_t turn(int warpgroup) const {
    return states() + S::kKeptBytes + count() * 16 + warpgroup * 8;
  }
  DEVICE uint32_t resident() const { return turn(2); }  // the barrier of resident weights
  DEVICE void init() {
    mbarrier_init(resident(), 1);
    for (int i = 0; i < 2; ++i) mbarrier_init(turn(i), kWarpgroup / 32);
    for (; index < count(); ++index) {
      mbarrier_init(full(), 1), mbarrier_init(empty(), S::kWarpgroups * kWarpgroup / 32);
    }
  }
  DEVICE void advance() {
    if (++index == count()) index = 0, ++round;
  }
  DEVICE void skip(int panels) {
    index += panels;
    round += index / count(), index %= count();
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
    if constexpr (S::kResident) load_weights();
    for_positions<S>(p, work, [&](const Position<S>& at) {
      if (at.has_product(work)) copy(at);
    });
    // No copy may be running when the block ends; a tile without a product has not waited for it.
    if (S::kResident && threadIdx.x % 32 == 0) mbarrier_wait(ring.resident(), 0);
  }

  DEVICE void load_weights() const {
    const Position<S> at(p, work, 0, blockIdx.x);  // by the whole warp
    if (threadIdx.x % 32 != 0) return;
    constexpr int kBytes = Ring<S>::kPanelBytes;
    mbarrier_arrive_expect_tx(ring.resident(), work.panels * kBytes);
    for (int panel = 0; panel < work.panels; ++panel) {
      bulk_copy(ring.columns(panel, work.panels), at.weight + int64_t(panel) * kBytes, kBytes,
                ring.resident());
    }
  }

  DEVICE void copy(const Position<S>& at) {
    const int lane = threadIdx.x % 32;
    const char* operand = at.operand(work, at.t + 1);  // of step t - 1, with the same parity
    const int ahead = min(ring.count(), work.panels);
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
    // The product of a block's only tile waits for these copies, so they come first. With several
    // tiles another tile's product runs now, and later copies must not wait for the fetches.
    const bool alone = tile_count(work) <= int(gridDim.x);
    const int first = alone ? ahead - 1 : 0, parts = alone ? 1 : S::kParts;
    for (int panel = 0; panel < work.panels; ++panel) {
      if (lane == 0) {
        if (panel >= ahead) start(early, at, panel);
        bulk_copy(ring.rows(), operand + panel * at.panel_bytes(work), S::kRows * kRowBytes,
                  ring.full());
      }
      ring.advance();
      __syncwarp();
      for (int i = 0; panel >= first && i < parts; ++i) prefetch_next();
    }
    while (part < S::kRows * S::kParts) prefetch_next();
  }

  // Begins a stage with the weight, which does not wait for the operand.
  DEVICE void start(Ring<S>& stage, const Position<S>& at, int panel) const {
    constexpr int kBytes = Ring<S>::kPanelBytes;
    mbarrier_wait(stage.empty(), stage.round - 1);
    mbarrier_arrive_expect_tx(stage.full(), Ring<S>::kBytes);
    if constexpr (!S::kResident) {
      bulk_copy(stage.columns(panel, work.panels), at.weight + int64_t(panel) * kBytes, kBytes,
                stage.full());
    }
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
  if (S::kResident && panels > 0) mbarrier_wait(ring.resident(), 0);
  const int own = Position<S>::own_blocks() * 64 * kRowBytes;
  wgmma_fence(sums[0], sums[S::kBlocks - 1]);
  Ring<S> before = ring;
  for (int panel = 0; panel < panels; ++panel) {
    mbarrier_wait(ring.full(), ring.round);
    const SharedOperand<Major::kDepth> rows(ring.rows() + own);
    const SharedOperand<Major::kDepth> columns(ring.columns(panel, panels));
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
