// What the backward pass needs of every row beside the gates: the divisor, and the gradient through
// it.
#pragma once
#include "backward_terms.cuh"
#include "mma.cuh"

namespace flashcell::cuda {

// A thread block for a chunk of a head, a warp for a row. delta_t = -(dh_t h_t) / N_t, with the
// sign of the denominator; h is the rounded one, whose errors are as small in the sum as those of
// its terms.
template <typename IO>
__global__ void __launch_bounds__(256) row_gradients(const BackwardParams p,
                                                     const BackwardTerms terms) {
  const int head = int(blockIdx.x % p.H);
  const Chunk chunk = terms.rows.chunks.at(blockIdx.x / p.H);
  for (int step = threadIdx.x / 32; step < chunk.steps; step += 8) {
    const int64_t at = terms.rows.row(head, chunk) + step, row = (chunk.row + step) * p.H + head;
    const float inflow = terms.rows.inflow[at];
    float inverse = terms.scale, delta = 0;
    if (p.normalized) {
      const float total = static_cast<const float*>(p.total)[row], floor = terms.rows.floor[at];
      const float size = fabsf(total);
      inverse = terms.scale / (fmaxf(size, floor) + float(p.eps));
      if (p.normalizer_grad && size > floor) {
        const IO* dh = static_cast<const IO*>(p.dh) + row * p.V;
        const IO* h = static_cast<const IO*>(p.h) + row * p.V;
        const float dot = warp_sum(part_of_dot<32>(dh, h, p.V, threadIdx.x % 32));
        delta = -copysignf(dot * inverse, dot * inverse * total);
      }
    }
    if (threadIdx.x % 32 == 0) {
      terms.weight[at] = inflow * inverse, terms.inverse[at] = inverse;
      if (p.normalized) terms.delta[at] = delta, terms.n_weight[at] = inflow * delta;
    }
  }
}

}  // namespace flashcell::cuda
