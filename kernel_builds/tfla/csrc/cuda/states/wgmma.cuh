// States between chunks on Hopper: each of two warpgroups keeps 64 rows by all columns of the
// thread block of one head's state in registers. Left rows are scaled in registers, where they are
// left operands.
#pragma once
#include "../chunk/ring.cuh"
#include "chunk_loop.cuh"

namespace flashcell::cuda {

template <typename IO, bool kReverse, int kColumns>
struct StateWgmma {
  static constexpr int kThreads = kRingThreads;
  static constexpr int kSteps = 64, kRows = kConsumers * 64, kSlots = 4;
  using Place = StatePlace<kReverse, kRows, kColumns>;
  using Rows = Tile<IO, kSteps>;
  struct Stage {
    alignas(1024) char left[Rows::bytes(kRows)];
    char right[Rows::bytes(kColumns)];
  };
  struct Shared {
    Stage stages[kSlots];
    float weight[kSlots][kSteps], n_weight[kSlots][kSteps];
    alignas(8) char barriers[kSlots * Slot::kBytes];
  };
  static constexpr int bytes(const Code&) { return int(sizeof(Shared)); }

  const Place place;
  Shared& shared;
  Ring<sizeof(Stage)> ring;

  DEVICE StateWgmma(const StateParams& p, const Segments& segments, Shared& memory)
      : place(p, segments),
        shared(memory),
        ring(shared_address(memory.stages), shared_address(memory.barriers), kSlots) {}

  DEVICE void produce() {
    for (int64_t chunk = place.begin; chunk < place.end; ++chunk) {
      const int count = int(place.steps(chunk));
      for (int step = 0; step < count; step += kSteps) {
        const Slot slot = ring.slot();
        slot.wait_empty(ring.round);
        Stage& to = shared.stages[ring.index];
        place.template copy<kWarpgroup>(Rows{shared_address(to.left)},
                                        Rows{shared_address(to.right)}, shared.weight[ring.index],
                                        shared.n_weight[ring.index], place.first_step(chunk) + step,
                                        count - step);
        slot.fill();
        ring.advance();
      }
    }
  }

  using Words = uint32_t[kSteps / 16][4];
  using OwnSums = StateSums<IO, 1, kColumns / 8>;

  // Loads the warp's 16 rows of a stage's left operand and scales them; also adds them, by their
  // own weights, to n.
  DEVICE void load(Words& words, OwnSums& sums, int warp) const {
    const Stage& stage = shared.stages[ring.index];
    const Left<Lies::kAcross, IO, kSteps> left(Rows{shared_address(stage.left)}, 0, warp / 4 * 64);
#pragma unroll
    for (int d = 0; d < kSteps / 16; ++d) {
      left.load(words[d], warp % 4, d);
      if (sums.has_n)
        DepthScale<IO>(shared.n_weight[ring.index] + d * 16).multiply(sums.n[0][0], words[d]);
      DepthScale<IO>(shared.weight[ring.index] + d * 16)(words[d]);
    }
  }

  DEVICE void consume(const StateParams& p, const Segments& segments) {
    const int warp = (warpgroup() - 1) * 4 + threadIdx.x % kWarpgroup / 32;
    OwnSums sums(p, place.row + warp * 16, place.column);
    sums.walk(place, segments, [&](int64_t chunk) {
      Words words;
      Slot running{};
      for (int left = int(place.steps(chunk)); left > 0; left -= kSteps) {
        const Slot slot = ring.slot();
        slot.wait_full(ring.round);
        // Until then products read the words, which the compiler does not know.
        wgmma_wait<0>(sums.C[0], words);
        if (running.full) running.release();
        load(words, sums, warp);
        wgmma_fence(sums.C[0], words);
        const SharedOperand<Major::kWidth> right(shared_address(shared.stages[ring.index].right),
                                                 Rows::kStride);
#pragma unroll
        for (int d = 0; d < kSteps / 16; ++d) wgmma<IO>(sums.C[0], words[d], right.step(d));
        wgmma_commit();
        running = slot;
        ring.advance();
      }
      wgmma_wait<0>(sums.C[0], words);
      running.release();
    });
  }

  DEVICE void run(const StateParams& p, const Segments& segments) {
    if (threadIdx.x == 0) ring.init(), mbarrier_init_fence();
    __syncthreads();
    if (warpgroup() == 0) {
      setmaxnreg_dec<kProducerRegisters>();
      produce();
    } else {
      setmaxnreg_inc<kConsumerRegisters>();
      consume(p, segments);
    }
  }
};

template <typename IO, bool kReverse, int kColumns>
__global__ void __launch_bounds__(kRingThreads, 1) states_wgmma(const StateParams p,
                                                                const Segments segments) {
#if FLASHCELL_WGMMA_CODE
  using Walk = StateWgmma<IO, kReverse, kColumns>;
  extern __shared__ __align__(1024) char memory[];
  Walk(p, segments, *reinterpret_cast<typename Walk::Shared*>(memory)).run(p, segments);
#else
  __trap();  // Compiled for sm_90 instead of sm_90a: fail, rather than return uninitialised memory.
#endif
}

}  // namespace flashcell::cuda
