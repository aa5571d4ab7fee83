// All gradients of narrow heads in one kernel: four warps walk
// through the chunks of one head of a sequence against time, with dC in registers. A chunk is one
// tile; each warp has 16 of its rows of dq, dk and dv:
//
//   dq = s (dh C^T / N + delta n) + dS k       rows t; dS = decay (dh v^T / N + delta)
//   dk = a (v dC^T + dn) + dS^T q              rows j
//   dv = a (k dC) + (W / N)^T dh               rows j; W = decay (q k^T)
//
// In bf16 dS and W / N are split in two pieces, because a few of their elements may be most of a
// gradient.
#pragma once
#include "../backward/gates.cuh"
#include "../states/chunk_loop.cuh"
#include "tile.cuh"

namespace flashcell::cuda {

template <typename IO, int kWidth>
struct NarrowGradients {
  static constexpr int kBlocks = kWidth / 8, kDepths = kWidth / 16, kStages = 2;
  static constexpr int kSummer =
      3;  // the warp with the fewest pairs also sums the gates' gradients
  static constexpr bool kSplit = std::is_same_v<IO, bf16>;  // fp16 rounds far less
  using RowTile = NarrowTile<kWidth>;
  using Place = StatePlace<true, kWidth, kWidth>;
  struct Stage {
    alignas(128) char q[RowTile::bytes(kTile)];
    char k[RowTile::bytes(kTile)], v[RowTile::bytes(kTile)], dh[RowTile::bytes(kTile)];
    char C[RowTile::bytes(kWidth)];
    float2 u[kTile], w[kTile];
    float inflow[kTile], outflow[kTile], inverse[kTile], delta[kTile];
    float weight[kTile], n_weight[kTile];
    int start[kTile];
    float n[kWidth];
    float keep;
  };
  struct State {  // dC rounded, as an operand, and dn
    alignas(128) char C[RowTile::bytes(kWidth)];
    float n[kWidth];
  };
  // What flows through the pairs of a chunk's steps, and through the states, by which the gates'
  // gradients are found: E (q k) by rows and by columns, of the same numbers.
  struct Flows {
    double in[4][kTile], out[kTile];  // of pairs: by warps
    float state_in[kTile], state_out[kTile];
    double crossing[4];  // by warps: across the chunk's end, from its steps and through it
  };
  struct Gates {  // pre-activations
    float i[kTile], f[kTile];
  };
  struct Shared {
    Stage stages[kStages];
    State states[2];
    Flows flows[2];
    Gates gates[3];  // the last chunk's, this one's, and the next one's
  };
  using OwnSums = StateSums<IO, 1, kBlocks>;
  using Sums = float[kBlocks][4];

  const BackwardParams& p;
  const BackwardTerms& terms;
  const StateParams& gradients;  // of the states
  const Place place;
  Shared& shared;
  const bool first_pass;     // computes dC alone
  const IO *q, *k, *v, *dh;  // the sequence's first rows
  const int warp = threadIdx.x / 32, r = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
  const int row = warp * 16 + r;  // the lane's rows are this and 8 further

  DEVICE NarrowGradients(const BackwardParams& params, const BackwardTerms& t, const StateParams& g,
                         const Segments& segments, Shared& memory)
      : p(params),
        terms(t),
        gradients(g),
        place(g, segments),
        shared(memory),
        first_pass(segments.first_pass),
        q(rows_of(params.q)),
        k(rows_of(params.k)),
        v(rows_of(params.v)),
        dh(rows_of(g.right)) {}

  DEVICE const IO* rows_of(const Strided& x) const {
    const int64_t first = place.sequence.row;
    return static_cast<const IO*>(x.data) + first / p.T * x.batch + first % p.T * x.time +
           place.head * x.head;
  }
  DEVICE Stage& stage(int64_t walked) { return shared.stages[unsigned(walked) % kStages]; }
  DEVICE State& state(int64_t walked) { return shared.states[unsigned(walked) % 2]; }
  DEVICE Flows& flows(int64_t walked) { return shared.flows[unsigned(walked) % 2]; }
  DEVICE Gates& gates(int64_t walked) { return shared.gates[unsigned(walked) % 3]; }
  DEVICE Chunk chunk_at(int64_t walked) const {
    return Chunks::part(place.sequence, place.number(walked), kTile);
  }
  DEVICE bool has_before(int64_t walked) const { return place.number(walked) > 0 || p.C || p.n; }
  DEVICE bool has_after(int64_t walked) const {
    return walked > 0 || gradients.first != nullptr || gradients.first_n != nullptr;
  }

  DEVICE void load(int64_t walked) {
    if (walked < place.end) {
      Stage& to = stage(walked);
      const int64_t step = place.first_step(walked);
      const int rows = int(place.steps(walked));
      const auto copy = [&](char* tile, const IO* from, int64_t stride, int64_t columns) {
        copy_narrow<kWidth>(RowTile{shared_address(tile)}, from + step * stride, stride, rows,
                            int(columns));
      };
      const Rows& all = terms.rows;
      const int64_t first = place.sequence.row + step, at = place.head * all.chunks.rows + first;
      const int64_t slot = all.slot(int(place.head), place.slot(walked));
      copy(to.q, q, p.q.time, p.K);
      copy(to.dh, dh, gradients.right.time, p.V);
      copy_floats<kTile>(to.weight, terms.weight + at, rows);
      if (p.normalized) copy_floats<kTile>(to.n_weight, terms.n_weight + at, rows, kTile);
      copy_floats<1>(&to.keep, all.keep + slot, 1);
      if (!first_pass) {
        copy_gate(gates(walked).i, p.i, first, rows, 0);
        copy_gate(gates(walked).f, p.f, first, rows, kTile);
        copy(to.k, k, p.k.time, p.K);
        copy(to.v, v, p.v.time, p.V);
        copy_floats<2 * kTile>(to.u, all.u + at, 2 * rows);
        copy_floats<2 * kTile>(to.w, all.w + at, 2 * rows);
        copy_floats<kTile>(to.inflow, all.inflow + at, rows);
        copy_floats<kTile>(to.outflow, all.outflow + at, rows, kTile);
        copy_floats<kTile>(to.inverse, terms.inverse + at, rows);
        copy_floats<kTile>(to.start, all.start + first, rows, kTile);
        // A cell without n has no delta and no n: zeros.
        copy_floats<kTile>(to.delta, p.normalized ? terms.delta + at : terms.inverse,
                           p.normalized ? rows : 0, kTile);
        if (has_before(walked)) {
          const IO* C = static_cast<const IO*>(terms.C) + slot * p.K * p.V;
          copy_state(to.C, C);
          copy_floats<kWidth>(to.n, p.normalized ? terms.n + slot * p.K : terms.inverse,
                              p.normalized ? int(p.K) : 0);
        }
      }
    }
    copy_commit();
  }
  DEVICE void copy_gate(float* to, const Strided& gate, int64_t row, int rows, int thread) const {
    const int t = int(threadIdx.x) - thread;
    if (t < 0 || t >= kTile) return;
    const float* from = static_cast<const float*>(gate.data) + row / p.T * gate.batch +
                        row % p.T * gate.time + place.head * gate.head;
    copy_word_or_zero(to + t, from + (t < rows ? t * gate.time : 0), t < rows);
  }
  DEVICE void copy_state(char* to, const IO* C) const {
    const RowTile tile{shared_address(to)};
    constexpr int kPieces = kWidth / 8;
#pragma unroll
    for (int i = threadIdx.x; i < kWidth * kPieces; i += kNarrowThreads) {
      const int k = i / kPieces, piece = i % kPieces;
      const bool exists = k < p.K && piece * 8 < p.V;
      copy_async_or_zero(tile.piece(k, piece), exists ? C + k * p.V + piece * 8 : C, exists);
    }
  }

  DEVICE static void load_left(uint32_t (&to)[kDepths][4], const char* rows, int first) {
    const NarrowLeft<Lies::kAlong, kWidth> left({shared_address(rows)}, first, 0);
#pragma unroll
    for (int d = 0; d < kDepths; ++d) left.load(to[d], 0, d);
  }
  // sums += E Z for 16 rows of Z from `first` on.
  DEVICE static void multiply_inner(Sums& sums, const float (&e)[2][4], const char* rows,
                                    int first) {
    const NarrowRight<Lies::kAcross, kWidth> right({shared_address(rows)}, first, 0);
    uint32_t whole[4], rest[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = e[i / 2][i % 2 * 2], y = e[i / 2][i % 2 * 2 + 1];
      const Pair<IO> pair = Pair<IO>::of(x, y);
      const float2 back = pair.floats();
      whole[i] = pair.word[0];
      if (kSplit) rest[i] = Pair<IO>::of(x - back.x, y - back.y).word[0];
    }
#pragma unroll
    for (int j = 0; j < kBlocks; j += 2) {
      uint32_t b[4];
      right.load(b, j / 2, 0);
      if (kSplit) {
        mma<IO>(sums[j], rest, b[0], b[1]);
        mma<IO>(sums[j + 1], rest, b[2], b[3]);
      }
      mma<IO>(sums[j], whole, b[0], b[1]);
      mma<IO>(sums[j + 1], whole, b[2], b[3]);
    }
  }
  // sums = outer (gain sums + add vector) for the lane's rows. Where outer is 0 the result is 0,
  // even if the state holds NaN.
  DEVICE void scale(Sums& sums, const float (&outer)[2], const float (&gain)[2],
                    const float (&add)[2], const float* vector) const {
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const float2 x =
          vector ? reinterpret_cast<const float2&>(vector[8 * j + 2 * quad]) : float2{};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float inner = fmaf(gain[i / 2], sums[j][i], add[i / 2] * (i % 2 ? x.y : x.x));
        sums[j][i] = outer[i / 2] == 0 ? 0.f : outer[i / 2] * inner;
      }
    }
  }
  // Returns the product of decays; computed for unseen pairs too.
  DEVICE static float decay_of(const float2& u, float whole, float rest) {
    return keep_float(exp2_approx((u.x + whole) + (u.y + rest)));
  }

  DEVICE void query(const Stage& from, Flows& to, bool before, const Chunk& chunk) const {
    uint32_t left[kDepths][4];
    load_left(left, from.dh, warp * 16);
    Sums sums = {};
    const float inverse[2] = {from.inverse[row], from.inverse[row + 8]};
    const float delta[2] = {from.delta[row], from.delta[row + 8]};
    if (before) {
      const NarrowRight<Lies::kAlong, kWidth> C({shared_address(from.C)}, 0, 0);
#pragma unroll
      for (int d = 0; d < kDepths; ++d) multiply_row<IO>(sums, left[d], C, d);
      scale(sums, {from.inflow[row], from.inflow[row + 8]}, inverse, delta, from.n);
    }
    store_flow(sums, from.q, to.state_in);
    const float2 u[2] = {from.u[row], from.u[row + 8]};
    const int start[2] = {from.start[row], from.start[row + 8]};
#pragma unroll 1
    for (int j = 0; j <= warp; ++j) {  // 16 columns of pairs
      float e[2][4] = {};
      const NarrowRight<Lies::kAlong, kWidth> v_rows({shared_address(from.v)}, 16 * j, 0);
#pragma unroll
      for (int d = 0; d < kDepths; ++d) multiply_row<IO>(e, left[d], v_rows, d);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = 16 * j + 8 * i + 2 * quad;
        const float4 w = reinterpret_cast<const float4&>(from.w[column]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const auto weigh = [&](int c, float whole, float rest, float& x) {
            const float decay = decay_of(u[half], whole, rest);
            const bool seen = start[half] <= c && c <= row + 8 * half;
            x = seen ? decay * fmaf(inverse[half], x, delta[half]) : 0.f;
          };
          weigh(column, w.x, w.y, e[i][2 * half]);
          weigh(column + 1, w.z, w.w, e[i][2 * half + 1]);
        }
      }
      multiply_inner(sums, e, from.k, 16 * j);
    }
    store(sums, p.dq, p.K, chunk);
  }

  DEVICE void key_and_value(const Stage& from, Flows& to, const State& after_state, bool after,
                            const Chunk& chunk) const {
    uint32_t left_v[kDepths][4], left_k[kDepths][4];
    load_left(left_v, from.v, warp * 16);
    load_left(left_k, from.k, warp * 16);
    Sums dk = {}, dv = {};
    if (after) {
      const NarrowRight<Lies::kAlong, kWidth> by_row({shared_address(after_state.C)}, 0, 0);
      const NarrowRight<Lies::kAcross, kWidth> by_column({shared_address(after_state.C)}, 0, 0);
#pragma unroll
      for (int d = 0; d < kDepths; ++d) multiply_row<IO>(dk, left_v[d], by_row, d);
#pragma unroll
      for (int d = 0; d < kDepths; ++d) multiply_row<IO>(dv, left_k[d], by_column, d);
      const float outer[2] = {from.outflow[row], from.outflow[row + 8]}, one[2] = {1, 1};
      scale(dk, outer, one, one, p.normalized ? after_state.n : nullptr);
      scale(dv, outer, one, one, nullptr);
    }
    store_flow(dk, from.k, to.state_out);
    double out[2] = {};
    const float2 w[2] = {from.w[row], from.w[row + 8]};
#pragma unroll 1
    for (int t = warp; t < kTile / 16; ++t) {  // 16 columns of pairs, which are steps that see
      if (16 * t >= chunk.steps) break;
      float ek[2][4] = {}, ev[2][4] = {};
      const NarrowRight<Lies::kAlong, kWidth> dh_rows({shared_address(from.dh)}, 16 * t, 0);
      const NarrowRight<Lies::kAlong, kWidth> q_rows({shared_address(from.q)}, 16 * t, 0);
#pragma unroll
      for (int d = 0; d < kDepths; ++d) multiply_row<IO>(ek, left_v[d], dh_rows, d);
#pragma unroll
      for (int d = 0; d < kDepths; ++d) multiply_row<IO>(ev, left_k[d], q_rows, d);
      double in[2][2] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = 16 * t + 8 * i + 2 * quad;
        const float4 u = reinterpret_cast<const float4&>(from.u[column]);
        const float2 inverse = reinterpret_cast<const float2&>(from.inverse[column]);
        const float2 delta = reinterpret_cast<const float2&>(from.delta[column]);
        const int start[2] = {from.start[column], from.start[column + 1]};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int j = row + 8 * half;
          const auto weigh = [&](int e, int first, float whole, float rest, float inverse,
                                 float delta) {
            float &x = ek[i][2 * half + e], &y = ev[i][2 * half + e];
            const float decay = decay_of(w[half], whole, rest);
            const int s = column + e;
            const bool seen = first <= j && j <= s && s < chunk.steps;
            x = seen ? decay * fmaf(inverse, x, delta) : 0.f;
            const double flow = x == 0 ? 0.f : x * y;
            in[i][e] += flow, out[half] += flow;
            y = seen ? decay * (inverse * y) : 0.f;
          };
          weigh(0, start[0], u.x, u.y, inverse.x, delta.x);
          weigh(1, start[1], u.z, u.w, inverse.y, delta.y);
        }
      }
      store_in(in, to.in[warp] + 16 * t);
      multiply_inner(dk, ek, from.q, 16 * t);
      multiply_inner(dv, ev, from.dh, 16 * t);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) out[half] += __shfl_xor_sync(~0u, out[half], mask);
      if (quad == 0) to.out[row + 8 * half] = out[half];
    }
    store(dk, p.dk, p.K, chunk);
    store(dv, p.dv, p.V, chunk);
  }
  // Stores the sums over the warp's rows of 16 columns.
  DEVICE void store_in(double (&in)[2][2], double* to) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) in[i][e] += __shfl_xor_sync(~0u, in[i][e], mask);
        if (r == 0) to[8 * i + 2 * quad + e] = in[i][e];
      }
    }
  }

  // Stores the lane's rows; padding gets zeros.
  DEVICE void store(const Sums& sums, void* to, int64_t width, const Chunk& chunk) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int t = row + 8 * half;
      const bool runs = t < chunk.steps;
      IO* at = static_cast<IO*>(to) + ((chunk.row + t) * p.H + place.head) * width;
#pragma unroll
      for (int j = 0; j < kBlocks; j += 4) {
        float low[4], high[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          low[i] = runs ? sums[j + i][2 * half] : 0.f;
          high[i] = runs ? sums[j + i][2 * half + 1] : 0.f;
        }
        store_row<IO>(at + 8 * j, low, high, t < chunk.rows, int(width) - 8 * j);
      }
    }
  }
  // Stores the dot product of each row's sums with the same row of x.
  DEVICE void store_flow(const Sums& sums, const char* x, float* to) const {
    const RowTile tile{shared_address(x)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int t = row + 8 * half;
      float total = 0;
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        const float2 pair = Pair<IO>{load_word(tile.word(t, 8 * j + 2 * quad))}.floats();
        total = fmaf(sums[j][2 * half], pair.x, total);
        total = fmaf(sums[j][2 * half + 1], pair.y, total);
      }
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) total += __shfl_xor_sync(~0u, total, mask);
      if (quad == 0) to[t] = total;
    }
  }

  // Stores the warp's part of what crosses the chunk's end: from its steps, and <C, dC> + <n, dn>
  // through the chunk, with the state before it and the gradient after it.
  DEVICE void store_crossing(const OwnSums& own, const Stage& from, bool through, Flows& to) const {
    float sum = 0;
    if (through && has_state()) {
      const RowTile C{shared_address(from.C)};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int k = row + 8 * half;
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
          const float2 x = Pair<IO>{load_word(C.word(k, 8 * j + 2 * quad))}.floats();
          const float2 dx = Pair<IO>::of(own.C[0][j][2 * half], own.C[0][j][2 * half + 1]).floats();
          sum = fmaf(x.x, dx.x, fmaf(x.y, dx.y, sum));
        }
        if (own.has_n && quad == 0) {
          sum = fmaf(from.n[k], own.n[0][0][2 * half] + own.n[0][0][2 * half + 1], sum);
        }
      }
    }
    double crossing = from.keep == 0 ? 0. : double(from.keep) * warp_sum(sum);
    const int lane = threadIdx.x % 32;
    crossing += warp_sum(lane < 16 ? double(to.state_out[warp * 16 + lane]) : 0.);
    if (lane == 0) to.crossing[warp] = crossing;
  }

  // di, from what flows out of each step, and df, from what crosses it, of a chunk: by one warp
  // with two steps per lane, later ones in lower lanes. The flows cancel to 2^-53 of their size: a
  // shut gate lets little through beside large flows that do not cross it.
  DEVICE void gate_sums(int64_t walked) {
    const Flows& from = flows(walked);
    const Gates& gate = gates(walked);
    const Chunk chunk = chunk_at(walked);
    const int lane = threadIdx.x % 32;
    double total[2], out[2];
    bool stopped[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int t = kTile - 1 - 2 * lane - e;
      const bool exists = t < chunk.steps;
      double in = 0;
      for (int by = 0; by <= t / 16; ++by) in += from.in[by][t];
      in += from.state_in[t], out[e] = from.out[t] + from.state_out[t];
      stopped[e] = exists && p.reset && p.reset[chunk.row + t];  // nothing crosses a reset
      total[e] = exists && !stopped[e] ? in - out[e] : 0;
    }
    // What the lane's steps pass on to earlier ones.
    double later = stopped[1] ? total[1] : total[1] + total[0];
    bool stop = stopped[1] || stopped[0];
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const double before = __shfl_up_sync(~0u, later, by);
      const bool before_stop = __shfl_up_sync(~0u, int(stop), by);
      if (lane >= by && !stop) later += before, stop = before_stop;
    }
    later = __shfl_up_sync(~0u, later, 1), stop = __shfl_up_sync(~0u, int(stop), 1);
    if (lane == 0) later = 0, stop = false;
    if (!stop) {
      for (const double part : from.crossing) later += part;
    }
    if (!stopped[0]) total[0] += later;
    if (!stopped[1]) total[1] += total[0];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int t = kTile - 1 - 2 * lane - e;
      if (t >= chunk.rows) continue;
      const int64_t row = chunk.row + t, at = row * p.H + place.head;
      const bool runs = t < chunk.steps && !(p.hold && p.hold[row]);
      const float i = gate.i[t];
      const float slope_i = p.exponential ? float(!(i < float(kNever))) : gate_slope(i);
      static_cast<float*>(p.di)[at] = runs ? float(out[e]) * slope_i : 0.f;
      static_cast<float*>(p.df)[at] = runs ? float(total[e]) * gate_slope(gate.f[t]) : 0.f;
    }
  }

  DEVICE bool has_state() const { return warp < kWidth / 16; }
  // Adds a chunk to the warp's 16 rows of dC.
  DEVICE void add(OwnSums& own, const Stage& from) const {
    const NarrowLeft<Lies::kAcross, kWidth> q_rows({shared_address(from.q)}, 0, warp * 16);
    const NarrowRight<Lies::kAcross, kWidth> dh_rows({shared_address(from.dh)}, 0, 0);
    own.scale(from.keep);
#pragma unroll
    for (int d = 0; d < kTile / 16; ++d) {
      uint32_t words[4];
      q_rows.load(words, 0, d);
      if (own.has_n) DepthScale<IO>(from.n_weight + 16 * d).multiply(own.n[0][0], words);
      DepthScale<IO>(from.weight + 16 * d)(words);
      multiply_row<IO>(own.C[0], words, dh_rows, d);
    }
  }
  DEVICE void share(const OwnSums& own, State& to) const {
    const RowTile tile{shared_address(to.C)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        const Pair<IO> pair = Pair<IO>::of(own.C[0][j][2 * half], own.C[0][j][2 * half + 1]);
        store_words(tile.word(row + 8 * half, 8 * j + 2 * quad), pair.word[0]);
      }
      if (own.has_n && quad == 0) {
        to.n[row + 8 * half] = own.n[0][0][2 * half] + own.n[0][0][2 * half + 1];
      }
    }
  }

  DEVICE void run(const Segments& segments) {
    for (int i = 0; i < kStages - 1; ++i) load(place.begin + i);
    OwnSums own(gradients, warp * 16, 0);
    if (has_state()) {
      own.begin(place, segments);
      share(own, state(place.begin));
    }
    for (int64_t walked = place.begin; walked < place.end; ++walked) {
      copy_wait<kStages - 2>();
      __syncthreads();
      load(walked + kStages - 1);
      const Stage& from = stage(walked);
      if (!first_pass) {
        if (warp == kSummer && walked > place.begin) gate_sums(walked - 1);
        const Chunk chunk = chunk_at(walked);
        const bool before = has_before(walked), after = has_after(walked);
        Flows& to = flows(walked);
        query(from, to, before, chunk);
        key_and_value(from, to, state(walked), after, chunk);
        __syncwarp();
        store_crossing(own, from, before && after, to);
      }
      if (has_state()) {
        add(own, from);
        share(own, state(walked + 1));
      }
    }
    if (has_state()) own.end(place, segments);
    if (first_pass) return;
    __syncthreads();
    if (warp == kSummer && place.begin < place.end) gate_sums(place.end - 1);
    if (place.segment == 0) clear_padding();
  }

  // Clears the gradients of what follows the last chunk that runs.
  DEVICE void clear_padding() const {
    const Sequence& s = place.sequence;
    const int64_t first = terms.rows.chunks.count(s) * kTile;
    for (int64_t t = first + threadIdx.x; t < s.length + s.padding; t += kNarrowThreads) {
      const int64_t at = (s.row + t) * p.H + place.head;
      const auto clear = [&](void* to, int64_t width) {
        uint4* words = reinterpret_cast<uint4*>(static_cast<IO*>(to) + at * width);
        for (int i = 0; i < width / 8; ++i) words[i] = make_uint4(0, 0, 0, 0);
      };
      clear(p.dq, p.K), clear(p.dk, p.K), clear(p.dv, p.V);
      static_cast<float*>(p.di)[at] = static_cast<float*>(p.df)[at] = 0;
    }
  }
};

template <typename IO, int kWidth>
__global__ void __launch_bounds__(kNarrowThreads, kWidth == 32 ? 4 : 2) narrow_gradients(
    const BackwardParams p, const BackwardTerms terms, const StateParams states,
    const Segments segments) {
  using Gradients = NarrowGradients<IO, kWidth>;
  extern __shared__ __align__(1024) char memory[];
  Gradients(p, terms, states, segments, *reinterpret_cast<typename Gradients::Shared*>(memory))
      .run(segments);
}

}  // namespace flashcell::cuda
