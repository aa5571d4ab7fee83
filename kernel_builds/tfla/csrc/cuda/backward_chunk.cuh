// dq, dk, dv and the gates' gradients of one chunk of one head: a thread block for dv, and one for
// dq and dk. Both take products of all pairs of rows (q k, or dh v), weigh them in registers to a
// triangle E of tiles in shared memory (W/N, or dS), and multiply that:
//
//   dv = a (k dC) + E^T dh
//   dq = s (dh C^T / N + delta n) + E k
//   dk = a (v dC^T + dn) + E^T q
//
// README, Backward, has the symbols. Factors of rows are applied to sums, in fp32.
#pragma once
#include "backward_terms.cuh"
#include "chunk.cuh"

namespace flashcell::cuda {

template <typename IO, int kTiles>
struct ChunkGradients : ChunkProducts<IO, kTiles> {
  using Base = ChunkProducts<IO, kTiles>;
  using Base::chunk, Base::group, Base::has_inner, Base::head, Base::kBlocks, Base::kColumns,
      Base::kRows, Base::kThreads, Base::outputs, Base::pair_steps, Base::part, Base::parts,
      Base::quad, Base::rows, Base::slot;
  using typename Base::Factors, typename Base::Output, typename Base::OutputSums,
      typename Base::PairSums;
  struct Shared : Base::Shared {
    float2 of_row[kRows];         // inverse and delta
    float in[kRows];              // q dq
    float anchor[kThreads / 32];  // <C, dC> + <n, dn> after the chunk, by warps
  };

  const BackwardParams& p;
  const BackwardTerms& terms;
  Shared& shared;

  DEVICE ChunkGradients(const BackwardParams& params, const BackwardTerms& t, Shared& memory,
                        int64_t slot, int head)
      : Base(params, t.rows, memory, slot, head, has_h(params)),
        p(params),
        terms(t),
        shared(memory) {}

  DEVICE Matrix<IO> dh() const {
    return this->matrix({p.dh, p.T * p.H * p.V, p.H * p.V, p.V}, p.V);
  }
  DEVICE void load_terms(bool has_delta) const {
    this->load_row_terms();
    const int row = threadIdx.x;
    if (row >= kRows) return;
    const bool exists = row < chunk.steps;
    const int64_t at = rows.row(head, chunk) + (exists ? row : 0);
    shared.of_row[row] = {exists ? terms.inverse[at] : 0.f,
                          exists && has_delta ? terms.delta[at] : 0.f};
  }

  // E = decay_tj (inverse_t sums + delta_t), where t sees j.
  template <bool kByDepth>
  DEVICE void triangle() {
    PairSums pairs;
    clear(pairs);
    this->template multiply_pairs<kByDepth>(pairs);
    const auto value_of = [&](int t) {
      const float2 of_row = shared.of_row[t];
      return [of_row](float sum) { return fmaf(of_row.x, sum, of_row.y); };
    };
    this->weigh(pairs, value_of, [](int, int, float) {});
  }

  // The warp's part of the rows' products with those of x, in by_part: set or added to by the lane
  // that owns it. Sums of what does not exist are 0.
  DEVICE void add_flow(const OutputSums& sums, const Matrix<IO>& x, int first,
                       bool is_first) const {
    int columns[kBlocks];
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) {
      columns[c] = (first + 8 * c < x.columns ? first + 8 * c : 0) + 2 * quad;
    }
    this->for_rows([&](int i, int half, int row, bool exists) {
      const IO* from = x.data + (exists ? row : 0) * x.stride;
      float total = 0;
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) {
        const float2 pair = load_pair(from + columns[c]);
        total = fmaf(sums[i][c][2 * half], pair.x, total);
        total = fmaf(sums[i][c][2 * half + 1], pair.y, total);
      }
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) total += __shfl_xor_sync(~0u, total, mask);
      float& flow = shared.by_part[part][row];
      if (quad == 0) flow = is_first ? total : flow + total;
    });
  }
  DEVICE float flow(int row) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += shared.by_part[i][row];
    return sum;
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
                  const Matrix<IO>* x) {
    const int depth = shared.outputs[index].depth, blocks = shared.outputs[index].blocks;
    for (int block = 0; block < blocks; ++block) {
      const int first = block * kColumns + part * (kColumns / 4);
      OutputSums sums;
      clear(sums);
      for (int s = 0; s < depth; ++s) {
        this->template multiply_state<kByDepth>(sums, this->template next<kByDepth>());
      }
      if (depth) this->scale(sums, vector, first, width, factors_of);
      if (has_inner) {
        this->template multiply_triangle<kTransposed>(sums, this->template next<kByDepth>());
      }
      this->store(sums, to, first, width);
      if (x) add_flow(sums, *x, first, block == 0);
    }
  }

  DEVICE bool has_before() const { return has_inner && (chunk.number > 0 || p.C || p.n); }
  DEVICE bool has_after() const {
    return chunk.steps && (!terms.is_last(slot) || p.dlast_C || p.dlast_n);
  }

  DEVICE void values() {
    this->template clear_padding<IO>(p.dv, p.V);
    if (chunk.steps == 0) return;
    const int depth = parts(p.K, kPanel<IO>);
    pair_steps = has_inner ? depth : 0;
    if (threadIdx.x == 0) {
      Output& output = shared.outputs[0];
      shared.right = output.rows = this->matrix(p.k, p.K);
      if (has_inner) shared.left = this->matrix(p.q, p.K), output.inner = dh();
      output.state = this->state(terms.dC);
      output.depth = has_after() ? depth : 0, output.blocks = parts(p.V, kColumns);
    }
    __syncthreads();
    this->template begin<true>();
    load_terms(false);
    if (has_inner) triangle<true>();
    run<true, true>(
        0, nullptr, [&](int row) { return Factors{shared.outflow[row], 1, 0}; }, p.dv, int(p.V),
        nullptr);
  }

  DEVICE void keys() {
    if (p.dq) this->template clear_padding<IO>(p.dq, p.K);
    this->template clear_padding<IO>(p.dk, p.K);
    this->template clear_padding<float>(p.di, 1), this->template clear_padding<float>(p.df, 1);
    if (chunk.steps == 0) return;
    const int depth = parts(p.V, kPanel<IO>);
    pair_steps = has_inner ? depth : 0, outputs = 2;
    if (threadIdx.x == 0) {
      Output &dq = shared.outputs[0], &dk = shared.outputs[1];
      shared.right = dk.rows = this->matrix(p.v, p.V), dq.inner = this->matrix(p.k, p.K);
      if (has_inner) shared.left = dq.rows = dh(), dk.inner = this->matrix(p.q, p.K);
      dq.state = this->state(terms.C), dk.state = this->state(terms.dC);
      dq.depth = has_before() ? depth : 0, dk.depth = has_after() ? depth : 0;
      dq.blocks = p.dq ? parts(p.K, kColumns) : 0, dk.blocks = parts(p.K, kColumns);
    }
    __syncthreads();
    this->template begin<false>();
    load_terms(has_inner && terms.delta != nullptr);
    add_anchor();
    if (has_inner) triangle<false>();
    const int64_t states = rows.slot(head, slot) * p.K;
    run<false, false>(
        0, terms.n ? terms.n + states : nullptr,
        [&](int row) {
          const float2 of_row = shared.of_row[row];
          return Factors{shared.inflow[row], of_row.x, of_row.y};
        },
        p.dq, int(p.K), has_inner ? &shared.outputs[1].inner : nullptr);
    __syncthreads();
    if (threadIdx.x < kRows) shared.in[threadIdx.x] = has_inner ? flow(threadIdx.x) : 0.f;
    __syncthreads();
    run<true, false>(
        1, terms.dn ? terms.dn + states : nullptr,
        [&](int row) { return Factors{shared.outflow[row], 1, 1}; }, p.dk, int(p.K),
        &shared.outputs[0].inner);
    __syncthreads();
    if (threadIdx.x < 32) gates();
  }

  // <C, dC> + <n, dn> after the chunk: the sum of all that crosses its end. dC as the products have
  // it, rounded: what flows in and out is of the same.
  DEVICE void add_anchor() const {
    const int64_t size = p.K * p.V, here = rows.slot(head, slot),
                  state = chunk.sequence * p.H + head;
    const IO *C = static_cast<const IO*>(terms.C),
             *dC = static_cast<const IO*>(terms.dC) + here * size;
    const float *last_C = static_cast<const float*>(p.last_C), *dn = terms.dn + here * p.K;
    float sum = 0;
    const auto add = [&](const auto* x, const auto* dx, int64_t width) {
      sum += part_of_dot<kThreads>(x, dx, width, threadIdx.x);
    };
    if (!terms.is_last(slot)) {
      add(C + (here + 1) * size, dC, size);
      if (terms.n) add(terms.n + (here + 1) * p.K, dn, p.K);
    } else if (has_after()) {
      add(last_C + state * size, dC, size);
      if (terms.n) add(static_cast<const float*>(p.last_n) + state * p.K, dn, p.K);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) shared.anchor[threadIdx.x / 32] = sum;
  }

  // di and df: what flows out of step j, and what crosses step t. Later steps are in lower lanes.
  DEVICE void gates() const {
    const int lane = threadIdx.x;
    float crossing = 0;
    for (const float part : shared.anchor) crossing += part;
    for (int last = (chunk.steps - 1) / 32 * 32 + 31; last > 0; last -= 32) {
      const int t = last - lane;
      const bool exists = t < chunk.steps;
      const int64_t row = chunk.row + t;
      const float out = flow(t);
      bool stopped = exists && p.reset && p.reset[row];  // nothing crosses a reset
      float total = exists && !stopped ? shared.in[t] - out : 0.f;
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
__global__ void
    __launch_bounds__(ChunkGradients<IO, kTiles>::kThreads, kTiles == 2 && sizeof(IO) == 2 ? 2 : 1)
    chunk_gradients(const BackwardParams p, const BackwardTerms terms) {
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
