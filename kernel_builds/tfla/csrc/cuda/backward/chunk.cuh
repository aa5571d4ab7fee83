// dq, dk, dv and the gates' gradients of one chunk of one head. One thread block computes dv,
// another dq and dk. Both multiply all pairs of rows (q k or dh v), weight the products in
// registers to form a lower triangle E of tiles in shared memory (W/N or dS), and multiply with
// that:
//
//   dv = a (k dC) + E^T dh
//   dq = s (dh C^T / N + delta n) + E k
//   dk = a (v dC^T + dn) + E^T q
//
// README.md, "Gradients", defines the symbols. Factors of rows are applied to the fp32 sums.
//
// The gradient of a log forget gate is the flow that crosses its step: from the chunk's pairs, from
// the state before it and to the state after it. A shut gate lets little through beside large flows
// that do not cross it, which therefore must cancel to 2^-53 of their size: their sums over rows
// and over columns are of the same numbers, E (q k), and in double.
#pragma once
#include "../chunk/products.cuh"
#include "common/cuda/ptx/wgmma.cuh"
#include "terms.cuh"

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
    float2 of_row[kRows];          // the inverse divisor and delta of each row
    float in[kRows];               // flow from the state before the chunk to each row
    float through[kThreads / 32];  // flow through the chunk, <C, dC> + <n, dn>: sums of the warps
  };
  struct PairFlows {  // sums of E (q k) over rows and over columns, by warps; stored where E was
    double in[4][kRows], out[Base::kGroups][kRows];
  };
  static_assert(sizeof(PairFlows) <= sizeof(Shared::triangle));

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

  // Computes E = decay_tj (inverse_t sums + delta_t) where t sees j.
  template <bool kByDepth>
  DEVICE void triangle() {
    PairSums pairs;
    clear(pairs);
    this->template multiply_pairs<kByDepth>(pairs, pair_steps);
    const auto value_of = [&](int t) {
      const float2 of_row = shared.of_row[t];
      return [of_row](float sum) { return fmaf(of_row.x, sum, of_row.y); };
    };
    this->weigh(pairs, value_of, [](int, int, float) {});
    __syncthreads();  // by_part overwrites memory that weigh read
  }

  // Computes the warp's part of the dot product of each row of `sums` with the same row of x, and
  // stores it in by_part, or adds it there unless `is_first`. Past the last column of x, `sums`
  // must be 0.
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

  DEVICE PairFlows& pair_flows() const {
    return *reinterpret_cast<PairFlows*>(&shared.triangle[0][0]);
  }
  // Computes the flows between pairs of steps; this overwrites E.
  DEVICE void find_pair_flows() {
    PairSums flows;
    clear(flows);
    this->template multiply_pairs<false>(flows, this->flow_steps);
    // Calls body(tile, half, flows of two neighbouring columns) for the lane's part of a row.
    const auto for_pairs = [&](int i, int down, const auto& body) {
#pragma unroll
      for (int j = 0; j <= Base::tile_of(i); ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (Base::is_above(i, j, half)) continue;
          float (&pair)[4] = flows[Base::of_pair(i, j)][half];
          body(j, half, pair[2 * down], pair[2 * down + 1]);
        }
      }
    };
    this->for_rows([&](int i, int down, int row, bool) {
      for_pairs(i, down, [&](int j, int half, float& x, float& y) {
        const auto tile = this->pair_tile(Base::tile_of(i), j);
        const int column = this->pair_column(half) + 2 * quad;
        const float2 e = cuda::load_pair(tile, row % kTile, column);
        x = e.x == 0 ? 0.f : e.x * x, y = e.y == 0 ? 0.f : e.y * y;
      });
    });
    __syncthreads();
    PairFlows& sums = pair_flows();
    this->for_rows([&](int i, int down, int row, bool) {
      double sum = 0;
      for_pairs(i, down, [&](int, int, float x, float y) { sum += double(x) + double(y); });
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) sum += __shfl_xor_sync(~0u, sum, mask);
      if (quad == 0) sums.in[part][row] = sum;
    });
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          double sum = 0;
#pragma unroll
          for (int i = 0; i < Base::kStrips; ++i) {
            if (Base::tile_of(i) < j || Base::is_above(i, j, half)) continue;
            const float (&pair)[4] = flows[Base::of_pair(i, j)][half];
            sum += double(pair[e]) + double(pair[2 + e]);
          }
#pragma unroll
          for (int mask = 4; mask < 32; mask *= 2) sum += __shfl_xor_sync(~0u, sum, mask);
          const int column = j * kTile + this->pair_column(half) + 2 * quad + e;
          if (Base::lane_row == 0) sums.out[group][column] = sum;
        }
      }
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
      if (x) add_flow(sums, *x, first, block == 0);
      if (this->loads_inner) {
        this->template multiply_triangle<kTransposed>(sums, this->template next<kByDepth>());
      }
      if (to) this->store(sums, to, first, width);
    }
  }

  DEVICE bool has_before() const { return chunk.number > 0 || p.C || p.n; }
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

  // With kGate it computes df only.
  template <bool kGate>
  DEVICE void keys() {
    if constexpr (kGate) {
      this->loads_inner = false;
    } else {
      if (p.dq) this->template clear_padding<IO>(p.dq, p.K);
      this->template clear_padding<IO>(p.dk, p.K);
      this->template clear_padding<float>(p.di, 1), this->template clear_padding<float>(p.df, 1);
    }
    if (chunk.steps == 0) return;
    const int depth = parts(p.V, kPanel<IO>);
    pair_steps = has_inner ? depth : 0, outputs = 2;
    this->flow_steps = has_inner ? parts(p.K, kPanel<IO>) : 0;
    if (threadIdx.x == 0) {
      Output &dq = shared.outputs[0], &dk = shared.outputs[1];
      shared.right = dk.rows = this->matrix(p.v, p.V), dq.inner = this->matrix(p.k, p.K);
      if (has_inner) shared.left = dq.rows = dh(), dk.inner = this->matrix(p.q, p.K);
      dq.state = this->state(terms.C), dk.state = this->state(terms.dC);
      dq.depth = has_inner && has_before() ? depth : 0, dk.depth = has_after() ? depth : 0;
      dq.blocks = p.dq ? parts(p.K, kColumns) : 0, dk.blocks = parts(p.K, kColumns);
    }
    __syncthreads();
    this->template begin<false>();
    load_terms(has_inner && terms.delta != nullptr);
    find_through();
    if (has_inner) triangle<false>();
    const int64_t states = rows.slot(head, slot) * p.K;
    run<false, false>(
        0, terms.n ? terms.n + states : nullptr,
        [&](int row) {
          const float2 of_row = shared.of_row[row];
          return Factors{shared.inflow[row], of_row.x, of_row.y};
        },
        kGate ? nullptr : p.dq, int(p.K), has_inner ? &shared.outputs[1].inner : nullptr);
    __syncthreads();
    if (threadIdx.x < kRows) shared.in[threadIdx.x] = has_inner ? flow(threadIdx.x) : 0.f;
    __syncthreads();
    run<true, false>(
        1, terms.dn ? terms.dn + states : nullptr,
        [&](int row) { return Factors{shared.outflow[row], 1, 1}; }, kGate ? nullptr : p.dk,
        int(p.K), &shared.outputs[0].inner);
    if (has_inner) find_pair_flows();
    __syncthreads();
    if (threadIdx.x < 32) gates<kGate>();
  }

  // Computes <C, dC> + <n, dn> from the state before the chunk and the gradient after it.
  DEVICE void find_through() const {
    const int64_t size = p.K * p.V, here = rows.slot(head, slot);
    float sum = 0;
    const auto add = [&](const auto* x, const auto* dx, int64_t width) {
      sum += part_of_dot<kThreads>(x + here * width, dx + here * width, width, threadIdx.x);
    };
    if (has_before() && has_after()) {
      add(static_cast<const IO*>(terms.C), static_cast<const IO*>(terms.dC), size);
      if (terms.n) add(terms.n, terms.dn, p.K);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) shared.through[threadIdx.x / 32] = sum;
  }

  // Computes di, from what flows out of each step, and df, from what crosses it. Later steps are in
  // lower lanes.
  template <bool kGate>
  DEVICE void gates() const {
    const int lane = threadIdx.x;
    const float keep = rows.keep[rows.slot(head, slot)];
    double crossing = 0;  // flow across the chunk's end: through the chunk, and from its steps
    for (int t = lane; t < chunk.steps; t += 32) crossing += flow(t);
    crossing = warp_sum(crossing);
    for (const float part : shared.through) crossing += keep == 0 ? 0. : double(keep) * part;
    for (int last = (chunk.steps - 1) / 32 * 32 + 31; last > 0; last -= 32) {
      const int t = last - lane;
      const bool exists = t < chunk.steps;
      const int64_t row = chunk.row + t;
      double in = shared.in[t], out = flow(t);
      if (has_inner) {
        for (const auto& of_part : pair_flows().in) in += of_part[t];
        for (const auto& of_group : pair_flows().out) out += of_group[t];
      }
      bool stopped = exists && p.reset && p.reset[row];  // nothing crosses a reset
      double total = exists && !stopped ? in - out : 0;
#pragma unroll
      for (int by = 1; by < 32; by *= 2) {
        const double later = __shfl_up_sync(~0u, total, by);
        const bool stop = __shfl_up_sync(~0u, int(stopped), by);
        if (lane >= by && !stopped) total += later, stopped = stop;
      }
      if (!stopped) total += crossing;
      crossing = __shfl_sync(~0u, total, 31);
      if (exists) store_gates<kGate>(row, float(total), float(out));
    }
  }

  template <bool kGate>
  DEVICE void store_gates(int64_t row, float crossing, float out) const {
    const auto value = [&](const Strided& gate) {
      const int64_t at = row / p.T * gate.batch + row % p.T * gate.time + head * gate.head;
      return static_cast<const float*>(gate.data)[at];
    };
    const auto slope = [](float x) { return 1 / (1 + expf(x)); };  // derivative of logsigmoid
    const bool held = p.hold && p.hold[row];
    static_cast<float*>(p.df)[row * p.H + head] = held ? 0.f : crossing * slope(value(p.f));
    if constexpr (!kGate) {
      const float i = value(p.i), slope_i = p.exponential ? float(!(i < float(kNever))) : slope(i);
      static_cast<float*>(p.di)[row * p.H + head] = held ? 0.f : out * slope_i;
    }
  }
};

// Blocks are ordered by chunk and head, dq dk before dv, so that both read their rows at the same
// time.
template <typename IO, int kTiles>
__global__ void
    __launch_bounds__(ChunkGradients<IO, kTiles>::kThreads, kTiles == 2 && sizeof(IO) == 2 ? 2 : 1)
    chunk_gradients(const BackwardParams p, const BackwardTerms terms) {
  using Gradients = ChunkGradients<IO, kTiles>;
  extern __shared__ __align__(1024) char memory[];
  if constexpr (kIsTuring && kTiles > 1) {
    __trap();  // longest_chunk is one tile there
  } else {
    const int64_t block = blockIdx.x / 2;
    Gradients gradients(p, terms, *reinterpret_cast<typename Gradients::Shared*>(memory),
                        block / p.H, int(block % p.H));
    if (blockIdx.x % 2) {
      gradients.values();
    } else {
      gradients.template keys<false>();
    }
  }
}

// Recomputes df of the chunks that gate_gradients has listed.
template <typename IO, int kTiles>
__global__ void __launch_bounds__(ChunkGradients<IO, kTiles>::kThreads, 1) shut_gates(
    const BackwardParams p, const BackwardTerms terms) {
#if FLASHCELL_WGMMA_CODE
  using Gradients = ChunkGradients<IO, kTiles>;
  extern __shared__ __align__(1024) char memory[];
  for (int i = blockIdx.x; i < *terms.shut_count; i += gridDim.x) {
    const int place = terms.shut[i];
    Gradients gradients(p, terms, *reinterpret_cast<typename Gradients::Shared*>(memory),
                        place / int(p.H), place % int(p.H));
    gradients.template keys<true>();
    __syncthreads();
  }
#else
  __trap();  // only the wgmma kernels write this list
#endif
}

}  // namespace flashcell::cuda
