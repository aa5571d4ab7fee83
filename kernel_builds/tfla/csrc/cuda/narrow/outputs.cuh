// h and the states of narrow heads in one kernel: four warps walk through the chunks of one head of
// a sequence, with its state in registers. A chunk is one tile; each warp has 16 of its rows of h.
#pragma once
#include "../forward/terms.cuh"
#include "../states/chunk_loop.cuh"
#include "tile.cuh"

namespace flashcell::cuda {

template <typename IO, int kWidth>
struct NarrowOutputs {
  static constexpr int kBlocks = kWidth / 8, kDepths = kWidth / 16, kStages = 3;
  using RowTile = NarrowTile<kWidth>;
  using Place = StatePlace<false, kWidth, kWidth>;
  struct Stage {
    alignas(1024) char q[RowTile::bytes(kTile)];
    char k[RowTile::bytes(kTile)], v[RowTile::bytes(kTile)];
    float2 u[kTile], w[kTile];
    float inflow[kTile], outflow[kTile];  // pairs of arrays are copied together
    float floor[kTile];
    int start[kTile];
    float keep;
  };
  struct Shared {
    Stage stages[kStages];
    NarrowState<IO, kWidth> states[2];
  };

  const ForwardParams& p;
  const StateParams& terms;
  const float scale;
  const Place place;
  Shared& shared;
  const bool has_h;     // whether h is computed, not only states
  const IO *q, *k, *v;  // the sequence's first rows
  const int warp = threadIdx.x / 32, r = threadIdx.x % 32 / 4, lane_q = threadIdx.x % 4;

  DEVICE NarrowOutputs(const ForwardParams& params, const StateParams& t, const Segments& segments,
                       Shared& memory)
      : p(params),
        terms(t),
        scale(1 / sqrtf(float(params.K))),
        place(t, segments),
        shared(memory),
        has_h(params.q.data != nullptr && !segments.first_pass),
        q(rows_of(params.q)),
        k(rows_of(params.k)),
        v(rows_of(params.v)) {}

  DEVICE const IO* rows_of(const Strided& x) const {
    const int64_t row = place.sequence.row;
    return static_cast<const IO*>(x.data) + row / p.T * x.batch + row % p.T * x.time +
           place.head * x.head;
  }
  DEVICE Stage& stage(int64_t chunk) { return shared.stages[unsigned(chunk) % kStages]; }
  DEVICE NarrowState<IO, kWidth>& state(int64_t chunk) {
    return shared.states[unsigned(chunk) % 2];
  }

  DEVICE void load(int64_t chunk) {
    if (chunk < place.end) {
      Stage& to = stage(chunk);
      const int64_t step = chunk * kTile;
      const int rows = int(place.steps(chunk));
      const auto copy = [&](char* tile, const IO* from, int64_t stride, int64_t columns) {
        copy_narrow<kWidth>(RowTile{shared_address(tile)}, from + step * stride, stride, rows,
                            int(columns));
      };
      if (has_h) copy(to.q, q, p.q.time, p.K);
      copy(to.k, k, p.k.time, p.K);
      copy(to.v, v, p.v.time, p.V);
      const auto& all = terms.rows;
      const int64_t row = place.sequence.row + step, at = place.head * all.chunks.rows + row;
      const int thread = threadIdx.x, t = thread % kTile;
      const bool exists = t < rows, pair_exists = thread / 2 < rows;
      const int64_t own = at + (exists ? t : 0), pair = 2 * at + (pair_exists ? thread : 0);
      copy_word_or_zero(&to.u[0].x + thread, &all.u[0].x + pair, pair_exists);
      copy_word_or_zero(&to.w[0].x + thread, &all.w[0].x + pair, pair_exists);
      copy_halves(to.inflow, all.inflow, all.outflow, own, exists);
      copy_halves(to.floor, all.floor, all.start + (row - at), own, exists);
      if (thread == 0) {
        copy_word_or_zero(&to.keep, all.keep + all.slot(int(place.head), place.slot(chunk)), true);
      }
    }
    copy_commit();
  }

  // h of the warp's rows: (s (q C) + W v) / N.
  DEVICE void outputs(Stage& from, const NarrowState<IO, kWidth>& before, bool has_before,
                      const Chunk& chunk) const {
    const int first = warp * 16, t0 = first + r;
    uint32_t left[kDepths][4];
    const NarrowLeft<Lies::kAlong, kWidth> q_rows({shared_address(from.q)}, first, 0);
#pragma unroll
    for (int d = 0; d < kDepths; ++d) q_rows.load(left[d], 0, d);
    float sums[kBlocks][4] = {}, total[2] = {};
    if (has_before) multiply_before(sums, total, left, from, before);

    const float2 u[2] = {from.u[t0], from.u[t0 + 8]};
    const int start[2] = {from.start[t0], from.start[t0 + 8]};
    const auto add_pairs = [&]<bool kMasked>(int j) {  // 32 columns of pairs
      float pairs[4][4] = {};
      const NarrowRight<Lies::kAlong, kWidth> k_rows({shared_address(from.k)}, 32 * j, 0);
#pragma unroll
      for (int d = 0; d < kDepths; ++d) multiply_row<IO>(pairs, left[d], k_rows, d);
      uint32_t weights[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = 32 * j + 8 * i + 2 * lane_q;
        const float4 w = reinterpret_cast<const float4&>(from.w[column]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // Computed for unseen pairs too: with a condition around each exponential, they would run
          // one after another.
          const auto weight = [&](int c, float whole, float rest, float pair) {
            const float decay = keep_float(exp2_approx((u[half].x + whole) + (u[half].y + rest)));
            const bool seen = !kMasked || (start[half] <= c && c <= t0 + 8 * half);
            return seen ? decay * (scale * pair) : 0.f;
          };
          const float near = weight(column, w.x, w.y, pairs[i][2 * half]);
          const float far = weight(column + 1, w.z, w.w, pairs[i][2 * half + 1]);
          total[half] += near + far;
          weights[i / 2][i % 2 * 2 + half] = Pair<IO>::of(near, far).word[0];
        }
      }
      const NarrowRight<Lies::kAcross, kWidth> v_rows({shared_address(from.v)}, 32 * j, 0);
      multiply_row<IO>(sums, weights[0], v_rows, 0);
      if (2 * j < warp) multiply_row<IO>(sums, weights[1], v_rows, 1);
    };
    // All steps of the chunk run and see all before them in it: only the last columns have a mask.
    const bool plain = chunk.steps == kTile && p.reset == nullptr && p.hold == nullptr;
    const int seen = plain ? warp / 2 : 0;
#pragma unroll 1
    for (int j = 0; j < seen; ++j) add_pairs.template operator()<false>(j);
#pragma unroll 1
    for (int j = seen; j <= warp / 2; ++j) add_pairs.template operator()<true>(j);
    store(sums, total, from, start, chunk);
  }

  // sums = s (q C), total = the lane's part of s (q n).
  DEVICE void multiply_before(float (&sums)[kBlocks][4], float (&total)[2],
                              const uint32_t (&left)[kDepths][4], const Stage& from,
                              const NarrowState<IO, kWidth>& before) const {
    const NarrowRight<Lies::kAcross, kWidth> C(before.C_tile(), 0, 0);
#pragma unroll
    for (int d = 0; d < kDepths; ++d) multiply_row<IO>(sums, left[d], C, d);
    float q_n[4] = {};
    if (p.normalized) {
#pragma unroll
      for (int d = 0; d < kDepths; d += 2) {
        uint32_t n[4];
        const int lane = threadIdx.x % 32;
        load_vectors(n, before.n_tile().piece(lane % 8, 2 * d + lane / 8));
        mma<IO>(q_n, left[d], n[0], n[1]);
        mma<IO>(q_n, left[d + 1], n[2], n[3]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float s = from.inflow[warp * 16 + r + 8 * half] * scale;
      const auto by = [s](float x) { return s == 0 ? 0.f : s * x; };
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        sums[j][2 * half] = by(sums[j][2 * half]);
        sums[j][2 * half + 1] = by(sums[j][2 * half + 1]);
      }
      total[half] = by(q_n[2 * half] + q_n[2 * half + 1]);
    }
  }

  DEVICE void store(const float (&sums)[kBlocks][4], float (&total)[2], const Stage& from,
                    const int (&start)[2], const Chunk& chunk) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int t = warp * 16 + r + 8 * half;
      const bool runs = t < chunk.steps && start[half] <= t;  // otherwise held, or padding
      float inverse = 1;
      if (p.normalized) {
#pragma unroll
        for (int mask = 1; mask < 4; mask *= 2) {
          total[half] += __shfl_xor_sync(~0u, total[half], mask);
        }
        if (lane_q == 0 && t < chunk.rows) {
          static_cast<float*>(p.total)[(chunk.row + t) * p.H + place.head] =
              runs ? total[half] : 0.f;
        }
        inverse = 1 / divisor(total[half], from.floor[t], p.eps);
      }
      IO* to = static_cast<IO*>(p.h) + ((chunk.row + t) * p.H + place.head) * p.V;
#pragma unroll
      for (int j = 0; j < kBlocks; j += 4) {
        float low[4], high[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          low[c] = runs ? inverse * sums[j + c][2 * half] : 0.f;
          high[c] = runs ? inverse * sums[j + c][2 * half + 1] : 0.f;
        }
        store_row<IO>(to + 8 * j, low, high, t < chunk.rows, int(p.V) - 8 * j);
      }
    }
  }

  using OwnSums = StateSums<IO, 1, kBlocks>;
  DEVICE bool has_state() const { return warp < kWidth / 16; }

  // Adds a chunk to the warp's 16 rows of the state.
  DEVICE void add(OwnSums& own, const Stage& from) const {
    const NarrowLeft<Lies::kAcross, kWidth> k_rows({shared_address(from.k)}, 0, warp * 16);
    const NarrowRight<Lies::kAcross, kWidth> v_rows({shared_address(from.v)}, 0, 0);
    own.scale(from.keep);
#pragma unroll
    for (int d = 0; d < kTile / 16; ++d) {
      const DepthScale<IO> weight(from.outflow + 16 * d);
      uint32_t words[4];
      k_rows.load(words, 0, d);
      if (own.has_n) weight.multiply(own.n[0][0], words);
      weight(words);
      multiply_row<IO>(own.C[0], words, v_rows, d);
    }
  }
  DEVICE void share(const OwnSums& own, NarrowState<IO, kWidth>& to) const {
    to.store(own.C[0], warp * 16);
    if (!own.has_n || lane_q != 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      to.store_n(warp * 16 + r + 8 * half, own.n[0][0][2 * half] + own.n[0][0][2 * half + 1]);
    }
  }

  DEVICE void run(const Segments& segments) {
    shared.states[0].clear_n(), shared.states[1].clear_n();
    __syncthreads();
    for (int i = 0; i < kStages - 1; ++i) load(place.begin + i);
    OwnSums own(terms, warp * 16, 0);
    if (has_state()) {
      own.begin(place, segments);
      share(own, state(place.begin));
    }
    const bool given = terms.first != nullptr || terms.first_n != nullptr;
    for (int64_t chunk = place.begin; chunk < place.end; ++chunk) {
      copy_wait<kStages - 2>();
      __syncthreads();
      load(chunk + kStages - 1);
      Stage& from = stage(chunk);
      const bool has_before = chunk > 0 || given;
      if (has_state() && has_before && terms.states != nullptr && !segments.first_pass) {
        own.write_chunk(terms.rows.slot(int(place.head), place.slot(chunk)));
      }
      if (has_h) {
        outputs(from, state(chunk), has_before, Chunks::part(place.sequence, chunk, kTile));
      }
      if (has_state()) {
        add(own, from);
        share(own, state(chunk + 1));
      }
    }
    if (has_state()) own.end(place, segments);
    if (has_h && place.segment == segments.count - 1) clear_padding();
  }

  // Clears h and total of what follows the last chunk that runs.
  DEVICE void clear_padding() const {
    const Sequence& s = place.sequence;
    const int64_t first = terms.rows.chunks.count(s) * kTile;
    for (int64_t t = first + threadIdx.x; t < s.length + s.padding; t += kNarrowThreads) {
      const int64_t at = (s.row + t) * p.H + place.head;
      if (p.normalized) static_cast<float*>(p.total)[at] = 0;
      uint4* h = reinterpret_cast<uint4*>(static_cast<IO*>(p.h) + at * p.V);
      for (int i = 0; i < p.V / 8; ++i) h[i] = make_uint4(0, 0, 0, 0);
    }
  }
};

template <typename IO, int kWidth>
__global__ void __launch_bounds__(kNarrowThreads, kWidth == 32 ? 4 : 2) narrow_outputs(
    const ForwardParams p, const StateParams states, const Segments segments) {
  using Outputs = NarrowOutputs<IO, kWidth>;
  extern __shared__ __align__(1024) char memory[];
  if constexpr (kIsTuring && kWidth > 32) {
    __trap();  // narrow_bytes is more than its thread blocks may use
  } else {
    Outputs(p, states, segments, *reinterpret_cast<typename Outputs::Shared*>(memory))
        .run(segments);
  }
}

}  // namespace flashcell::cuda
