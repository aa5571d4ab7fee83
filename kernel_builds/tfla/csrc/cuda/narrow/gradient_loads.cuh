// What a thread block of the backward of narrow heads has in shared memory, and the copies into it.
#pragma once
#include "../backward/gates.cuh"
#include "../states/chunk_loop.cuh"
#include "tile.cuh"

namespace flashcell::cuda {

template <typename IO, int kWidth>
struct NarrowGradientLoads {
  static constexpr int kBlocks = kWidth / 8, kDepths = kWidth / 16, kStages = 2;
  static constexpr int kSummer =
      3;  // the warp with the fewest pairs also sums the gates' gradients
  using RowTile = NarrowTile<kWidth>;
  using Place = StatePlace<true, kWidth, kWidth>;
  struct Stage {
    alignas(128) char q[RowTile::bytes(kTile)];
    char k[RowTile::bytes(kTile)], v[RowTile::bytes(kTile)], dh[RowTile::bytes(kTile)];
    char C[RowTile::bytes(kWidth)];
    float2 u[kTile], w[kTile];
    float inflow[kTile], outflow[kTile], inverse[kTile], delta[kTile];
    float weight[kTile], n_weight[kTile];  // pairs of arrays are copied together
    int start[kTile];
    float n[kWidth], keep;
  };
  struct State {  // dC rounded, as an operand, and dn
    alignas(128) char C[RowTile::bytes(kWidth)];
    float n[kWidth];
  };
  // What flows through the pairs of a chunk's steps and through the states, by which the gates'
  // gradients are found. If a forget gate is shut, that of pairs is E (q k) by rows and by columns,
  // of the same numbers; otherwise `state_in` and `out` are q dq and k dk.
  struct Flows {
    double in[4][kTile], out[kTile];  // of pairs: by warps
    float state_in[kTile], state_out[kTile];
    double crossing[4];  // by warps: across the chunk's end, from its steps and through it
  };
  struct Gates {  // pre-activations
    float i[kTile], f[kTile];

    // Whether one of the forget gates is so nearly shut that the flows' difference would lose what
    // crosses it; a warp calls it.
    DEVICE bool is_shut() const {
      const int lane = threadIdx.x % 32;
      return __ballot_sync(~0u, f[lane] < kShutGate || f[lane + 32] < kShutGate) != 0;
    }
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

  DEVICE NarrowGradientLoads(const BackwardParams& params, const BackwardTerms& t,
                             const StateParams& g, const Segments& segments, Shared& memory)
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
      const int thread = threadIdx.x, t = thread % kTile;
      const bool exists = t < rows, by_n = p.normalized;
      const int64_t own = at + (exists ? t : 0);
      copy(to.q, q, p.q.time, p.K);
      copy(to.dh, dh, gradients.right.time, p.V);
      copy_halves(to.weight, terms.weight, by_n ? terms.n_weight : terms.weight, own,
                  exists && (by_n || thread < kTile));
      if (thread == 0) copy_word_or_zero(&to.keep, all.keep + slot, true);
      if (!first_pass) {
        const unsigned b = unsigned(first) / unsigned(p.T), time = unsigned(first) - b * p.T;
        const Strided& gate = thread < kTile ? p.i : p.f;
        copy_word_or_zero(gates(walked).i + thread,
                          static_cast<const float*>(gate.data) + b * gate.batch +
                              (time + (exists ? t : 0)) * gate.time + place.head * gate.head,
                          exists);
        copy(to.k, k, p.k.time, p.K);
        copy(to.v, v, p.v.time, p.V);
        const bool pair_exists = thread / 2 < rows;
        const int64_t pair = 2 * at + (pair_exists ? thread : 0);
        copy_word_or_zero(&to.u[0].x + thread, &all.u[0].x + pair, pair_exists);
        copy_word_or_zero(&to.w[0].x + thread, &all.w[0].x + pair, pair_exists);
        copy_halves(to.inflow, all.inflow, all.outflow, own, exists);
        // A cell without n has no delta and no n: zeros.
        copy_halves(to.inverse, terms.inverse, by_n ? terms.delta : terms.inverse, own,
                    exists && (by_n || thread < kTile));
        if (thread < kTile) {
          copy_word_or_zero(reinterpret_cast<float*>(to.start + thread),
                            reinterpret_cast<const float*>(all.start + first + own - at), exists);
        }
        if (has_before(walked)) {
          copy_state(to.C, static_cast<const IO*>(terms.C) + slot * p.K * p.V);
          if (t < kWidth && thread >= kTile) {
            const bool has_n = by_n && t < p.K;
            copy_word_or_zero(
                to.n + t, (by_n ? terms.n : terms.inverse) + (has_n ? slot * p.K + t : 0), has_n);
          }
        }
      }
    }
    copy_commit();
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
  DEVICE bool has_state() const { return warp < kWidth / 16; }
};

}  // namespace flashcell::cuda
