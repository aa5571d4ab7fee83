// All gradients of narrow heads in one kernel: four warps walk
// through the chunks of one head of a sequence against time, with dC in registers. A chunk is one
// tile; each warp has 16 of its rows of dq, dk and dv:
//
//   dq = s (dh C^T / N + delta n) + dS k       rows t; dS = decay (dh v^T / N + delta)
//   dk = a (v dC^T + dn) + dS^T q              rows j
//   dv = a (k dC) + (W / N)^T dh               rows j; W = decay (q k^T)
//
// dS and W / N are split in two pieces, because a few of their elements may be most of a gradient,
// and because the gates' are differences of q dq and k dk.
#pragma once
#include "gate_flows.cuh"

namespace flashcell::cuda {

template <typename IO, int kWidth>
struct NarrowGradients : NarrowGateFlows<IO, kWidth> {
  using Base = NarrowGateFlows<IO, kWidth>;
  using Base::Base;
  using Base::first_pass, Base::gradients, Base::kBlocks, Base::kDepths, Base::kStages,
      Base::kSummer, Base::p, Base::place, Base::quad, Base::r, Base::row, Base::terms, Base::warp;
  using typename Base::Flows, typename Base::OwnSums, typename Base::RowTile, typename Base::Stage,
      typename Base::State, typename Base::Sums;

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
      rest[i] = Pair<IO>::of(x - back.x, y - back.y).word[0];
    }
#pragma unroll
    for (int j = 0; j < kBlocks; j += 2) {
      uint32_t b[4];
      right.load(b, j / 2, 0);
      mma<IO>(sums[j], rest, b[0], b[1]);
      mma<IO>(sums[j + 1], rest, b[2], b[3]);
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

  // Whether all steps of the chunk run and see all before them in it.
  DEVICE bool is_plain(const Chunk& chunk) const {
    return chunk.steps == kTile && p.reset == nullptr && p.hold == nullptr;
  }

  DEVICE void query(const Stage& from, Flows& to, bool before, bool shut,
                    const Chunk& chunk) const {
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
    if (shut) this->store_flow(sums, from.q, to.state_in);
    const float2 u[2] = {from.u[row], from.u[row + 8]};
    const int start[2] = {from.start[row], from.start[row + 8]};
    const auto add_pairs = [&]<bool kMasked>(int j) {  // 16 columns of pairs
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
            const bool seen = !kMasked || (start[half] <= c && c <= row + 8 * half);
            x = seen ? decay * fmaf(inverse[half], x, delta[half]) : 0.f;
          };
          weigh(column, w.x, w.y, e[i][2 * half]);
          weigh(column + 1, w.z, w.w, e[i][2 * half + 1]);
        }
      }
      multiply_inner(sums, e, from.k, 16 * j);
    };
    const int seen = is_plain(chunk) ? warp : 0;  // columns without a mask
#pragma unroll 1
    for (int j = 0; j < seen; ++j) add_pairs.template operator()<false>(j);
#pragma unroll 1
    for (int j = seen; j <= warp; ++j) add_pairs.template operator()<true>(j);
    if (!shut) this->store_flow(sums, from.q, to.state_in);
    store(sums, p.dq, p.K, chunk);
  }

  DEVICE void key_and_value(const Stage& from, Flows& to, const State& after_state, bool after,
                            bool shut, const Chunk& chunk) const {
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
    this->store_flow(dk, from.k, to.state_out);
    double out[2] = {};
    const float2 w[2] = {from.w[row], from.w[row + 8]};
    // Adds 16 columns of pairs, which are steps that see the lane's rows.
    const auto add_pairs = [&]<bool kShut, bool kMasked>(int t) {
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
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int j = row + 8 * half;
          const auto weigh = [&](int e, float whole, float rest, float inverse, float delta) {
            float &x = ek[i][2 * half + e], &y = ev[i][2 * half + e];
            const float decay = decay_of(w[half], whole, rest);
            const int s = column + e;
            const bool seen = !kMasked || (from.start[s] <= j && j <= s && s < chunk.steps);
            x = seen ? decay * fmaf(inverse, x, delta) : 0.f;
            if constexpr (kShut) {
              const double flow = x == 0 ? 0.f : x * y;
              in[i][e] += flow, out[half] += flow;
            }
            y = seen ? decay * (inverse * y) : 0.f;
          };
          weigh(0, u.x, u.y, inverse.x, delta.x);
          weigh(1, u.z, u.w, inverse.y, delta.y);
        }
      }
      if constexpr (kShut) this->store_in(in, to.in[this->warp] + 16 * t);
      multiply_inner(dk, ek, from.q, 16 * t);
      multiply_inner(dv, ev, from.dh, 16 * t);
    };
    const int end = (chunk.steps + 15) / 16;
    if (shut) {
#pragma unroll 1
      for (int t = warp; t < end; ++t) add_pairs.template operator()<true, true>(t);
    } else {
      const int seen = is_plain(chunk) ? warp + 1 : end;  // columns without a mask from here on
#pragma unroll 1
      for (int t = warp; t < seen && t < end; ++t) add_pairs.template operator()<false, true>(t);
#pragma unroll 1
      for (int t = seen; t < end; ++t) add_pairs.template operator()<false, false>(t);
    }
    if (shut) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int mask = 1; mask < 4; mask *= 2) out[half] += __shfl_xor_sync(~0u, out[half], mask);
        if (quad == 0) to.out[row + 8 * half] = out[half];
      }
    } else {
      this->store_flow(dk, from.k, to.out);
    }
    store(dk, p.dk, p.K, chunk);
    store(dv, p.dv, p.V, chunk);
  }

  // Stores the lane's rows; padding gets zeros.
  DEVICE void store(Sums& sums, void* to, int64_t width, const Chunk& chunk) const {
    if (chunk.steps < kTile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool runs = row + i / 2 * 8 < chunk.steps;
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) sums[j][i] = runs ? sums[j][i] : 0.f;
      }
    }
    IO* first = static_cast<IO*>(to) + ((chunk.row + row) * p.H + place.head) * width;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      IO* at = first + half * (8 * p.H * width);
#pragma unroll
      for (int j = 0; j < kBlocks; j += 4) {
        float low[4], high[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          low[i] = sums[j + i][2 * half], high[i] = sums[j + i][2 * half + 1];
        }
        store_row<IO>(at + 8 * j, low, high, row + 8 * half < chunk.rows, int(width) - 8 * j);
      }
    }
  }

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
    for (int i = 0; i < kStages - 1; ++i) this->load(place.begin + i);
    OwnSums own(gradients, warp * 16, 0);
    if (this->has_state()) {
      own.begin(place, segments);
      share(own, this->state(place.begin));
    }
    for (int64_t walked = place.begin; walked < place.end; ++walked) {
      copy_wait<kStages - 2>();
      __syncthreads();
      this->load(walked + kStages - 1);
      const Stage& from = this->stage(walked);
      if (!first_pass) {
        if (warp == kSummer && walked > place.begin) this->gate_sums(walked - 1);
        const Chunk chunk = this->chunk_at(walked);
        const bool before = this->has_before(walked), after = this->has_after(walked);
        Flows& to = this->flows(walked);
        const bool shut = this->gates(walked).is_shut();
        query(from, to, before, shut, chunk);
        key_and_value(from, to, this->state(walked), after, shut, chunk);
        __syncwarp();
        this->store_crossing(own, from, before && after, to);
      }
      if (this->has_state()) {
        add(own, from);
        share(own, this->state(walked + 1));
      }
    }
    if (this->has_state()) own.end(place, segments);
    if (first_pass) return;
    __syncthreads();
    if (warp == kSummer && place.begin < place.end) this->gate_sums(place.end - 1);
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
  if constexpr (kIsTuring && kWidth > 32) {
    __trap();  // narrow_bytes is more than its thread blocks may use
  } else {
    Gradients(p, terms, states, segments, *reinterpret_cast<typename Gradients::Shared*>(memory))
        .run(segments);
  }
}

}  // namespace flashcell::cuda
