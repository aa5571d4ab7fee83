// h of one chunk of one head: (s (q C) + E v) / N, where E are the weights W of the chunk's pairs
// before the division by N. README.md, "Equations".
#pragma once
#include "../chunk/products.cuh"
#include "terms.cuh"

namespace flashcell::cuda {

template <typename IO, int kTiles>
struct ChunkOutputs : ChunkProducts<IO, kTiles> {
  using Base = ChunkProducts<IO, kTiles>;
  using Base::chunk, Base::head, Base::kColumns, Base::kRows, Base::kStrips, Base::lane_row,
      Base::part, Base::parts, Base::quad, Base::rows, Base::slot;
  using typename Base::Factors, typename Base::Output, typename Base::OutputSums,
      typename Base::PairSums;
  struct Shared : Base::Shared {
    float from_n[kRows];  // s (q n)
  };

  const ForwardParams& p;
  const ForwardTerms& terms;
  Shared& shared;

  DEVICE ChunkOutputs(const ForwardParams& params, const ForwardTerms& t, Shared& memory,
                      int64_t slot, int head)
      : Base(params, t.rows, memory, slot, head, true), p(params), terms(t), shared(memory) {}

  DEVICE void weigh_pairs() {
    this->load_row_terms();
    PairSums pairs;
    clear(pairs);
    this->template multiply_pairs<true>(pairs, this->pair_steps);
    float sums[kStrips][2] = {};
    this->weigh(
        pairs, [&](int) { return [this](float sum) { return terms.scale * sum; }; },
        [&](int i, int half, float weights) { sums[i][half] += weights; });
    if (!p.normalized) return;
    __syncthreads();  // by_part overwrites memory that weigh read
    this->for_rows([&](int i, int half, int row, bool) {
      float sum = sums[i][half];
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) sum += __shfl_xor_sync(~0u, sum, mask);
      if (quad == 0) shared.by_part[part][row] = sum, shared.from_n[row] = 0;
    });
  }

  DEVICE float inflow(int row) const { return shared.inflow[row] * terms.scale; }

  // Multiplies q n for one stage and the warp's own strip. The code is straight-line so that it
  // does not delay the products beside it.
  DEVICE void multiply_n(float (&sums)[4], uint32_t stage, const float* n, int count) const {
    const Left<Lies::kAlong, IO, kRows> left({stage}, this->strip_row(part), 0);
#pragma unroll
    for (int k = 0; k < kPanel<IO> / kDepth<IO>; ++k) {
      uint32_t a[4];
      left.load(a, 0, k);
      const int first = k * kDepth<IO>;
      DepthScale<IO>(n + first, count - first).multiply(sums, a);
    }
  }

  // sums = s (q C); with_n: also s (q n), for which the warps of a group share the strips.
  DEVICE void multiply_before(OutputSums& sums, int depth, bool with_n) {
    static_assert(kStrips <= 4);
    const bool has_strip = with_n && part < kStrips;
    const float* n = has_strip ? terms.n + rows.slot(head, slot) * p.K : nullptr;
    float q_n[4] = {};
    for (int s = 0; s < depth; ++s) {
      const uint32_t stage = this->template next<true>();
      this->template multiply_state<true>(sums, stage);
      const int first = s * kPanel<IO>;
      if (has_strip) multiply_n(q_n, stage, n + first, int(p.K) - first);
    }
    this->scale(sums, nullptr, 0, 0, [&](int row) { return Factors{inflow(row), 1, 0}; });
    if (!has_strip || quad != 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = this->strip_row(part) + lane_row + 8 * half;
      const float s = inflow(row);
      shared.from_n[row] = s == 0 ? 0.f : s * (q_n[2 * half] + q_n[2 * half + 1]);
    }
  }

  DEVICE bool is_held(int row) const { return shared.start[row] > row % kTile; }

  // Returns 1 / N, or 0 if the step is held. With `tell` it writes the row's total for the caller.
  DEVICE float inverse(int row, bool tell) const {
    if (row >= chunk.steps) return 0;
    const bool held = is_held(row);
    float total = held ? 0.f : shared.from_n[row];
#pragma unroll
    for (int w = 0; w < 4; ++w) total += held ? 0.f : shared.by_part[w][row];
    if (tell) static_cast<float*>(p.total)[(chunk.row + row) * p.H + head] = total;
    return held ? 0.f : 1 / divisor(total, rows.floor[rows.row(head, chunk) + row], p.eps);
  }

  DEVICE void run() {
    this->template clear_padding<IO>(p.h, p.V);
    if (p.normalized) this->template clear_padding<float>(p.total, 1);
    if (chunk.steps == 0) return;
    const bool has_before = chunk.number > 0 || p.C || p.n;
    const int depth = has_before ? parts(p.K, kPanel<IO>) : 0;
    this->pair_steps = parts(p.K, kPanel<IO>);
    if (threadIdx.x == 0) {
      Output& output = shared.outputs[0];
      shared.left = output.rows = this->matrix(p.q, p.K), shared.right = this->matrix(p.k, p.K);
      output.state = this->state(terms.C), output.inner = this->matrix(p.v, p.V);
      output.depth = depth, output.blocks = parts(p.V, kColumns);
    }
    __syncthreads();
    this->template begin<true>();
    weigh_pairs();
    for (int block = 0; block < parts(p.V, kColumns); ++block) {
      const int first = block * kColumns + part * (kColumns / 4);
      OutputSums sums;
      clear(sums);
      if (depth) multiply_before(sums, depth, p.normalized && block == 0);
      this->template multiply_triangle<false>(sums, this->template next<true>());
      const bool tell = block == 0 && part == 0 && quad == 0;
      this->scale(sums, nullptr, 0, 0, [&](int row) {
        return Factors{p.normalized ? inverse(row, tell) : float(!is_held(row)), 1, 0};
      });
      this->store(sums, p.h, first, int(p.V));
    }
  }
};

template <typename IO, int kTiles>
__global__ void
    __launch_bounds__(ChunkOutputs<IO, kTiles>::kThreads, kTiles == 2 && sizeof(IO) == 2 ? 2 : 1)
    chunk_outputs(const ForwardParams p, const ForwardTerms terms) {
  using Outputs = ChunkOutputs<IO, kTiles>;
  extern __shared__ __align__(1024) char memory[];
  if constexpr (kIsTuring && kTiles > 1) {
    __trap();  // longest_chunk is one tile there
  } else {
    Outputs(p, terms, *reinterpret_cast<typename Outputs::Shared*>(memory), blockIdx.x / p.H,
            int(blockIdx.x % p.H))
        .run();
  }
}

}  // namespace flashcell::cuda
