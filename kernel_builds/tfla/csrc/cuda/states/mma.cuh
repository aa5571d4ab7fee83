// States between chunks with mma.sync: a thread block keeps 128 rows by 128 columns of one head's
// state in registers. Left rows are scaled as operands; sums are fp32.
#pragma once
#include "chunk_loop.cuh"
#include "common/cuda/stages.cuh"

namespace flashcell::cuda {

template <typename IO, bool kReverse>
struct StateWalk {
  static constexpr int kThreads = 128, kSize = 128;
  static constexpr int kMostStages = 3, kStages = kStagesOf<kMostStages>;
  static constexpr int kSteps = 128 / sizeof(IO);  // steps of a stage
  using Place = StatePlace<kReverse, kSize, kSize>;
  using Rows = Tile<IO, kSteps>;
  struct Stage {
    alignas(1024) char left[Rows::bytes(kSize)];
    char right[Rows::bytes(kSize)];
  };
  struct Shared {
    Stage stages[kStages];
    float weight[kStages][kSteps], n_weight[kStages][kSteps];
  };
  static constexpr int bytes(const Code& code) {
    constexpr int kOfStage = int(sizeof(Stage)) + 2 * kSteps * int(sizeof(float));
    return bytes_with_stages<Shared>(code, kStages, kMostStages, kOfStage);
  }

  const Place place;
  Shared& shared;
  int64_t ahead, ahead_step = 0;  // the next stage to load: its chunk, and its first step there
  int loads = 0, stage = 0;
  StateSums<IO, 4, 8> sums;

  // The warp's part of the state.
  DEVICE static int m0() { return threadIdx.x / 64 * 64; }
  DEVICE static int n0() { return threadIdx.x / 32 % 2 * 64; }

  DEVICE StateWalk(const StateParams& p, const Segments& segments, Shared& memory)
      : place(p, segments),
        shared(memory),
        ahead(place.begin),
        sums(p, place.row + m0(), place.column + n0()) {}

  DEVICE void load() {
    if (ahead < place.end) {
      const int slot = loads % kStages;
      Stage& to = shared.stages[slot];
      place.template copy<kThreads>(Rows{shared_address(to.left)}, Rows{shared_address(to.right)},
                                    shared.weight[slot], shared.n_weight[slot],
                                    place.first_step(ahead) + ahead_step,
                                    int(place.steps(ahead) - ahead_step));
      ahead_step += kSteps;
      if (ahead_step >= place.steps(ahead)) ++ahead, ahead_step = 0;
    }
    ++loads;
    copy_commit();
  }

  DEVICE void add(int slot, int rows) {
    const Left<Lies::kAcross, IO, kSteps> left(Rows{shared_address(shared.stages[slot].left)}, 0,
                                               m0());
    const Right<Lies::kAcross, IO, kSteps> right(Rows{shared_address(shared.stages[slot].right)}, 0,
                                                 n0());
#pragma unroll
    for (int d = 0; d < kSteps / kDepth<IO>; ++d) {
      if (d * kDepth<IO> >= rows) break;
      const DepthScale<IO> weight(shared.weight[slot] + d * kDepth<IO>);
      const DepthScale<IO> n_weight(shared.n_weight[slot] + d * kDepth<IO>);
      multiply<IO>(sums.C, left, right, d, [&](uint32_t (&words)[4], int i, int) {
        if (sums.has_n) n_weight.multiply(sums.n[i][0], words);
        weight(words);
      });
    }
  }

  DEVICE void run(const Segments& segments) {
    for (int i = 0; i < kStages - 1; ++i) load();
    sums.walk(place, segments, [&](int64_t chunk) {
      const int count = int(place.steps(chunk));
      for (int step = 0; step < count; step += kSteps, ++stage) {
        next_stage<kStages>([&] { load(); });
        add(stage % kStages, count - step);
      }
    });
  }
};

template <typename IO, bool kReverse>
__global__ void __launch_bounds__(128, sizeof(IO) == 2 ? 2 : 1) states_kernel(
    const StateParams p, const Segments segments) {
  using Walk = StateWalk<IO, kReverse>;
  extern __shared__ __align__(1024) char memory[];
  Walk(p, segments, *reinterpret_cast<typename Walk::Shared*>(memory)).run(segments);
}

}  // namespace flashcell::cuda
