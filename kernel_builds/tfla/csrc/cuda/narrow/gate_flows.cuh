// The gradients of narrow heads' gates: what flows through the pairs of a chunk's steps and through
// its states, and its sums.
#pragma once
#include "gradient_loads.cuh"

namespace flashcell::cuda {

template <typename IO, int kWidth>
struct NarrowGateFlows : NarrowGradientLoads<IO, kWidth> {
  using Base = NarrowGradientLoads<IO, kWidth>;
  using Base::Base;
  using Base::p, Base::place, Base::quad, Base::r, Base::row, Base::terms, Base::warp,
      Base::kBlocks;
  using typename Base::Flows, typename Base::Gates, typename Base::OwnSums, typename Base::RowTile,
      typename Base::Stage, typename Base::Sums;

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

  // Stores the dot product of each row's sums with the same row of x.
  template <typename Flow>
  DEVICE void store_flow(const Sums& sums, const char* x, Flow* to) const {
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
    if (through && this->has_state()) {
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
  // with two steps per lane, later ones in lower lanes. Where a gate is shut the flows cancel to
  // 2^-53 of their size: it lets little through beside large flows that do not cross it.
  DEVICE void gate_sums(int64_t walked) {
    const Flows& from = this->flows(walked);
    const Gates& gate = this->gates(walked);
    const Chunk chunk = this->chunk_at(walked);
    const int lane = threadIdx.x % 32;
    const bool shut = gate.is_shut();
    double total[2], out[2];
    bool stopped[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int t = kTile - 1 - 2 * lane - e;
      const bool exists = t < chunk.steps;
      double in = from.state_in[t];
      out[e] = from.out[t];
      if (shut) {
        for (int by = 0; by <= t / 16; ++by) in += from.in[by][t];
        out[e] += from.state_out[t];
      }
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
};

}  // namespace flashcell::cuda
