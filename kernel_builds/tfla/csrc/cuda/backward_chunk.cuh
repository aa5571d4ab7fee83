// dq, dk, dv and the gates' gradients of one chunk of one head: a thread block for dv, and one for
// dq and dk. Both take products of all pairs of rows (q k, or dh v), weigh them in registers to a
// triangle E of tiles in shared memory (W/N, or dS), and multiply that:
//
//   dv = a (k dC) + E^T dh       dq = s (dh C^T / N + delta n) + E k       dk = a (v dC^T + dn) +
//   E^T q
//
// README, Backward, has the symbols. Factors of rows are applied to sums, in fp32.
#pragma once
#include "backward.h"
#include "chunk.cuh"

namespace flashcell::cuda {

template <typename IO, int kTiles>
struct ChunkGradients : ChunkProducts<IO, kTiles> {
  using Base = ChunkProducts<IO, kTiles>;
  using Base::chunk, Base::group, Base::head, Base::kBlocks, Base::kColumns, Base::kRows,
      Base::kThreads, Base::outputs, Base::pair_steps, Base::part, Base::parts, Base::quad,
      Base::rows, Base::slot;
  using typename Base::Factors, typename Base::Output, typename Base::OutputSums,
      typename Base::PairSums;
  struct Shared : Base::Shared {
    float2 of_row[kRows];     // inverse and delta
    float flow[2][4][kRows];  // what a row takes in, and what it gives, by warps
  };

  const BackwardParams& p;
  const BackwardTerms& terms;
  Shared& shared;
  const bool has_h;

  DEVICE ChunkGradients(const BackwardParams& params, const BackwardTerms& t, Shared& memory,
                        int64_t slot, int head)
      : Base(params, t.rows, memory, slot, head, params.dh != nullptr),
        p(params),
        terms(t),
        shared(memory),
        has_h(params.dh != nullptr) {}

  DEVICE Matrix<IO> dh() const {
    return this->matrix({p.dh, p.T * p.H * p.V, p.H * p.V, p.V}, p.V);
  }
  DEVICE float inverse(int row) const {
    return terms.inverse ? terms.inverse[rows.row(head, chunk) + row] : terms.scale;
  }

  // E = decay_tj (inverse_t sums + delta_t), where t sees j.
  template <bool kByDepth>
  DEVICE void triangle(bool has_delta) {
    this->load_row_terms();
    const int row = threadIdx.x;
    if (row < kRows) {
      const bool exists = row < chunk.steps;
      shared.of_row[row] = {exists ? inverse(row) : 0.f,
                            exists && has_delta ? terms.delta[rows.row(head, chunk) + row] : 0.f};
    }
    PairSums pairs;
    clear(pairs);
    this->template multiply_pairs<kByDepth>(pairs);
    this->weigh(
        pairs, [&](int t, float sum) { return fmaf(shared.of_row[t].x, sum, shared.of_row[t].y); },
        [](int, int, float) {});
  }

  // The warp's part of the rows' products with those of x: added to flow, by the lanes that own it.
  DEVICE void add_flow(float (&flow)[4][kRows], const OutputSums& sums, const Matrix<IO>& x,
                       int first) const {
    this->for_rows([&](int i, int half, int row, bool exists) {
      const IO* from = x.data + row * x.stride + first + 2 * quad;
      float total = 0;
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) {
        if (!exists || first + 8 * c >= x.columns) break;
        const float2 pair = load_pair(from + 8 * c);
        total = fmaf(sums[i][c][2 * half], pair.x, total);
        total = fmaf(sums[i][c][2 * half + 1], pair.y, total);
      }
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) total += __shfl_xor_sync(~0u, total, mask);
      if (quad == 0) flow[part][row] += total;
    });
  }
  DEVICE static float2 load_pair(const IO* from) {
    if constexpr (sizeof(IO) == 4) {
      return reinterpret_cast<const float2&>(*from);
    } else {
      return reinterpret_cast<const Pair<IO>&>(*from).floats();
    }
  }

  template <bool kTransposed, bool kByDepth, typename FactorsOf>
  DEVICE void run(int index, const float* vector, const FactorsOf& factors_of, void* to, int width,
                  const Matrix<IO>* x, int flow) {
    const int depth = shared.outputs[index].depth, blocks = shared.outputs[index].blocks;
    for (int block = 0; block < blocks; ++block) {
      const int first = block * kColumns + part * (kColumns / 4);
      OutputSums sums;
      clear(sums);
      for (int s = 0; s < depth; ++s)
        this->template multiply_state<kByDepth>(sums, this->template next<kByDepth>());
      if (depth) this->scale(sums, vector, first, width, factors_of);
      if (has_h)
        this->template multiply_triangle<kTransposed>(sums, this->template next<kByDepth>());
      this->store(sums, to, first, width);
      if (x) add_flow(shared.flow[flow], sums, *x, first);
    }
  }

  DEVICE bool has_before() const { return has_h && (chunk.number > 0 || p.C || p.n); }
  DEVICE bool has_after() const {
    return chunk.steps && (!terms.is_last(slot) || p.dlast_C || p.dlast_n);
  }

  DEVICE void values() {
    this->template clear_padding<IO>(p.dv, p.V);
    if (chunk.steps == 0) return;
    const int depth = parts(p.K, kPanel<IO>);
    pair_steps = has_h ? depth : 0;
    if (threadIdx.x == 0) {
      Output& output = shared.outputs[0];
      shared.right = output.rows = this->matrix(p.k, p.K);
      if (has_h) shared.left = this->matrix(p.q, p.K), output.inner = dh();
      output.state = this->state(terms.dC);
      output.depth = has_after() ? depth : 0, output.blocks = parts(p.V, kColumns);
    }
    __syncthreads();
    this->template begin<true>();
    if (has_h) triangle<true>(false);
    const float* outflow = rows.outflow + rows.row(head, chunk);
    run<true, true>(
        0, nullptr, [&](int row) { return Factors{outflow[row], 1, 0}; }, p.dv, int(p.V), nullptr,
        0);
  }

  DEVICE void keys() {
    if (p.dq) this->template clear_padding<IO>(p.dq, p.K);
    this->template clear_padding<IO>(p.dk, p.K);
    this->template clear_padding<float>(p.di, 1), this->template clear_padding<float>(p.df, 1);
    if (chunk.steps == 0) return;
    const int depth = parts(p.V, kPanel<IO>);
    pair_steps = has_h ? depth : 0, outputs = 2;
    if (threadIdx.x == 0) {
      Output &dq = shared.outputs[0], &dk = shared.outputs[1];
      shared.right = dk.rows = this->matrix(p.v, p.V), dq.inner = this->matrix(p.k, p.K);
      if (has_h) shared.left = dq.rows = dh(), dk.inner = this->matrix(p.q, p.K);
      dq.state = this->state(terms.C), dk.state = this->state(terms.dC);
      dq.depth = has_before() ? depth : 0, dk.depth = has_after() ? depth : 0;
      dq.blocks = p.dq ? parts(p.K, kColumns) : 0, dk.blocks = parts(p.K, kColumns);
    }
    for (int i = threadIdx.x; i < 2 * 4 * kRows; i += kThreads) (&shared.flow[0][0][0])[i] = 0;
    __syncthreads();
    this->template begin<false>();
    if (has_h) triangle<false>(terms.delta != nullptr);
    const int64_t first = rows.row(head, chunk), states = rows.slot(head, slot) * p.K;
    run<false, false>(
        0, terms.n ? terms.n + states : nullptr,
        [&](int row) {
          const float delta = terms.delta ? terms.delta[first + row] : 0.f;
          return Factors{rows.inflow[first + row], inverse(row), delta};
        },
        p.dq, int(p.K), has_h ? &shared.outputs[1].inner : nullptr, 0);
    run<true, false>(
        1, terms.dn ? terms.dn + states : nullptr,
        [&](int row) { return Factors{rows.outflow[first + row], 1, 1}; }, p.dk, int(p.K),
        &shared.outputs[0].inner, 1);
    __syncthreads();
    if (threadIdx.x < 32) gates();
  }

  // di and df: what flows out of step j, and what crosses step t. Later steps are in lower lanes.
  DEVICE void gates() const {
    const int lane = threadIdx.x;
    float crossing = has_after() ? terms.anchor(head, slot) : 0.f;
    for (int last = (chunk.steps - 1) / 32 * 32 + 31; last > 0; last -= 32) {
      const int t = last - lane;
      const bool exists = t < chunk.steps;
      const int64_t row = chunk.row + t;
      float in = 0, out = 0;
      for (int i = 0; i < 4; ++i) in += shared.flow[0][i][t], out += shared.flow[1][i][t];
      bool stopped = exists && p.reset && p.reset[row];  // nothing crosses a reset
      float total = exists && !stopped ? in - out : 0.f;
#pragma unroll
      for (int by = 1; by < 32; by *= 2) {
        const float later = __shfl_up_sync(~0u, total, by);
        const bool stop = __shfl_up_sync(~0u, int(stopped), by);
        if (lane >= by && !stopped) total += later, stopped = stop;
      }
      if (!stopped) total += crossing;
      crossing = __shfl_sync(~0u, total, 31);
      if (exists) store_gates(row, total, out);
    }
  }

  DEVICE void store_gates(int64_t row, float crossing, float out) const {
    const auto slope = [&](const Strided& gate) {  // of logsigmoid
      const int64_t at = row / p.T * gate.batch + row % p.T * gate.time + head * gate.head;
      return 1 / (1 + expf(static_cast<const float*>(gate.data)[at]));
    };
    const bool held = p.hold && p.hold[row];
    const float di = held ? 0.f : p.exponential ? out : out * slope(p.i);
    static_cast<float*>(p.di)[row * p.H + head] = di;
    static_cast<float*>(p.df)[row * p.H + head] = held ? 0.f : crossing * slope(p.f);
  }
};

// In the order of blocks: chunk, head, and dq dk before dv, so that both read their rows at a time.
template <typename IO, int kTiles>
__global__ void __launch_bounds__(256, kTiles == 2 && sizeof(IO) == 2 ? 2 : 1) chunk_gradients(
    const BackwardParams p, const BackwardTerms terms) {
  using Gradients = ChunkGradients<IO, kTiles>;
  extern __shared__ __align__(1024) char memory[];
  const int64_t block = blockIdx.x / 2;
  Gradients gradients(p, terms, *reinterpret_cast<typename Gradients::Shared*>(memory), block / p.H,
                      int(block % p.H));
  if (blockIdx.x % 2) {
    gradients.values();
  } else {
    gradients.keys();
  }
}

}  // namespace flashcell::cuda
