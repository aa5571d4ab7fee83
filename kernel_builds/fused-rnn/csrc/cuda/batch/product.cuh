// The copies into the ring of stages, and the matrix product out of it.
#pragma once
#include "common/cuda/ptx/bulk_copy.cuh"
#include "common/cuda/ptx/global_memory.cuh"
#include "common/cuda/ptx/named_barrier.cuh"
#include "common/cuda/ptx/wgmma.cuh"
#include "position.cuh"

namespace flashcell::cuda::batch {

// A position in the ring. A stage holds the rows of the operand, then those of the weight; `full`
// and `empty` are its barriers. Behind the stages lie the states that stay in shared memory.
template <typename S>
struct Ring {
  static constexpr int kBytes = S::kTile.stage_bytes(S::G);
  static constexpr int kOperandBytes = S::kRows * kRowBytes;
  static constexpr int kWeightBytes = S::kColumns * kRowBytes;
  uint32_t memory;
  int index = 0, round = 0;

  DEVICE explicit Ring(uint32_t memory) : memory(memory) {}
  DEVICE uint32_t rows() const { return memory + index * kBytes; }
  DEVICE uint32_t columns() const { return rows() + kOperandBytes; }
  DEVICE uint32_t states() const { return memory + S::kStages * kBytes; }
  DEVICE uint32_t full() const { return states() + S::kKeptBytes + index * 16; }
  DEVICE uint32_t empty() const { return full() + 8; }
  // The barrier at which a warpgroup waits for its turn.
  DEVICE uint32_t turn(int warpgroup) const {
    return states() + S::kKeptBytes + S::kStages * 16 + warpgroup * 8;
  }
  DEVICE void init() {
    for (int i = 0; i < 2; ++i) mbarrier_init(turn(i), kWarpgroup / 32);
    for (; index < S::kStages; ++index) {
      mbarrier_init(full(), 2);  // the warp of the operand and that of the weights
      mbarrier_init(empty(), S::kWarpgroups * kWarpgroup / 32);
    }
  }
  DEVICE void advance() {
    if (++index == S::kStages) index = 0, ++round;
  }
  DEVICE void skip(int panels) {
    index += panels;
    round += index / S::kStages, index %= S::kStages;
  }
  // Copies `bytes` into the stage once it is empty.
  DEVICE void fill(uint32_t to, const char* from, int bytes) const {
    mbarrier_wait(empty(), round - 1);
    mbarrier_arrive_expect_tx(full(), bytes);
    bulk_copy(to, from, bytes, full());
  }
  DEVICE void release() const {  // reports that the warp has finished with the stage
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty());
  }
};

// Three warps load: one copies the operand, one the weights, which wait for no other thread block,
// and one fetches x into L2. One warp that did all of it would make a step up to two thirds
// longer (NOTEBOOK.md, "The batch engine").
enum LoadingWarp { kOperandWarp, kWeightWarp, kInputWarp };
// The barrier at which the operand's and the input's warp begin a tile together, and its threads.
constexpr int kTileBarrier = 3, kTileThreads = 64;

// The warp that copies the weights.
template <typename S>
DEVICE void copy_weights(const SequenceParams& p, const Work& work, Ring<S> ring) {
  for_positions<S>(p, work, [&](const Position<S>& at) {
    if (threadIdx.x % 32 != 0) return;
    for (int panel = 0; panel < at.panels(work); ++panel, ring.advance()) {
      constexpr int kBytes = Ring<S>::kWeightBytes;
      ring.fill(ring.columns(), at.weight + int64_t(panel) * kBytes, kBytes);
    }
  });
}

// The warp that copies the operand: the input, then h, once all blocks have written it. Its
// arrivals at the stages' barriers also order what a warpgroup keeps in shared memory before what
// the other one reads.
template <typename S>
DEVICE void copy_operand(const SequenceParams& p, const Work& work, Ring<S> ring) {
  for_positions<S>(p, work, [&](const Position<S>& at) {
    if (at.panels(work) == 0) return;
    const bool copies = threadIdx.x % 32 == 0;
    const auto copy = [&](const char* operand, int panels) {
      for (int panel = 0; copies && panel < panels; ++panel, ring.advance()) {
        ring.fill(ring.rows(), operand + panel * at.panel_bytes(work), Ring<S>::kOperandBytes);
      }
    };
    copy(at.input(work, at.t), work.input_panels);
    if (copies && at.has_h(work)) {
      if (at.t > 0) wait_acquired(at.published, at.t * work.unit_tiles * S::kWarpgroups);
      fence_proxy_async_global();
    }
    __syncwarp();
    named_barrier_sync_diverged<kTileThreads>(kTileBarrier);
    const char* h = at.operand(work, at.t + 1);  // of step t - 1, with the same parity
    copy(h, at.has_h(work) ? work.panels : 0);
    __syncwarp();
  });
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
    const SharedOperand<Major::kDepth> rows(ring.rows() + own);
    const SharedOperand<Major::kDepth> columns(ring.columns());
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
