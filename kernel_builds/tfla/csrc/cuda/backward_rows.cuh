// What the backward pass needs of every row beside the gates: the divisor, and the gradient through
// it.
#pragma once
#include "backward_terms.cuh"
#include "mma.cuh"

namespace flashcell::cuda {

constexpr int kRowsAtOnce = 4;  // of a warp: enough reads under way

// The lane's part of dh_t h_t, of rows from `row` on, of which `count` exist.
template <typename IO>
DEVICE void part_of_dots(float (&sums)[kRowsAtOnce], const BackwardParams& p, int64_t row,
                         int count) {
  const IO *dh = static_cast<const IO*>(p.dh), *h = static_cast<const IO*>(p.h);
#pragma unroll 2
  for (int column = threadIdx.x % 32 * 4; column < p.V; column += 128) {
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      const int64_t at = (row + (i < count ? i : 0) * p.H) * p.V + column;
      const float4 a = load_four(dh + at), b = load_four(h + at);
      sums[i] = fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sums[i]))));
    }
  }
}

// A thread block for a chunk of a head. delta_t = -(dh_t h_t) / N_t, with the sign of the
// denominator; h is the rounded one, whose errors are as small in the sum as those of its terms.
template <typename IO>
__global__ void __launch_bounds__(256) row_gradients(const BackwardParams p,
                                                     const BackwardTerms terms) {
  const int head = int(blockIdx.x % unsigned(p.H)), lane = threadIdx.x % 32;
  const Chunk chunk = terms.rows.chunks.at(blockIdx.x / unsigned(p.H));
  for (int first = threadIdx.x / 32 * kRowsAtOnce; first < chunk.steps; first += 8 * kRowsAtOnce) {
    const int64_t row = (chunk.row + first) * p.H + head;
    const int count = chunk.steps - first;
    float dots[kRowsAtOnce] = {}, dot = 0;
    if (p.normalized && p.normalizer_grad) part_of_dots<IO>(dots, p, row, count);
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      const float sum = warp_sum(dots[i]);
      if (lane == i) dot = sum;
    }
    if (lane >= kRowsAtOnce || lane >= count) continue;
    const int64_t at = terms.rows.row(head, chunk) + first + lane;
    const float inflow = terms.rows.inflow[at];
    float inverse = terms.scale, delta = 0;
    if (p.normalized) {
      const float total = static_cast<const float*>(p.total)[row + lane * p.H];
      const float floor = terms.rows.floor[at], size = fabsf(total);
      inverse = terms.scale / (fmaxf(size, floor) + float(p.eps));
      if (p.normalizer_grad && size > floor) {
        delta = -copysignf(dot * inverse, dot * inverse * total);
      }
      terms.delta[at] = delta, terms.n_weight[at] = inflow * delta;
    }
    terms.weight[at] = inflow * inverse, terms.inverse[at] = inverse;
  }
}

}  // namespace flashcell::cuda
