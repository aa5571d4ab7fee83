// The values of each row that the backward pass needs besides the gates: the divisor, and its
// gradient.
#pragma once
#include "common/cuda/ptx/mma.cuh"
#include "terms.cuh"

namespace flashcell::cuda {

constexpr int kRowThreads = 256;
constexpr int kRowsAtOnce = 4;  // rows of a warp: enough loads in flight

// dots[t] = dh_t h_t and the sum of its squared terms, for every row of a chunk; the block's warps
// share the rows.
template <typename IO>
DEVICE void find_dots(float2 (&dots)[kLongestChunk], const BackwardParams& p, const Chunk& chunk,
                      int head) {
  const IO *dh = static_cast<const IO*>(p.dh), *h = static_cast<const IO*>(p.h);
  const int lane = threadIdx.x % 32;
  for (int first = threadIdx.x / 32 * kRowsAtOnce; first < chunk.steps;
       first += kRowThreads / 32 * kRowsAtOnce) {
    const int64_t row = (chunk.row + first) * p.H + head;
    const int count = chunk.steps - first;
    float sums[kRowsAtOnce] = {}, squares[kRowsAtOnce] = {};
#pragma unroll 2
    for (int column = lane * 4; column < p.V; column += 128) {
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const int64_t at = (row + (i < count ? i : 0) * p.H) * p.V + column;
        const float4 a = load_four(dh + at), b = load_four(h + at);
        for (const float term : {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w}) {
          sums[i] += term, squares[i] = fmaf(term, term, squares[i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      const float2 dot = {warp_sum(sums[i]), warp_sum(squares[i])};
      if (lane == 0 && i < count) dots[first + i] = dot;
    }
  }
}

// Computes and stores the terms of a row t, given its dh_t h_t and the sum of the squared terms;
// returns its spread. delta_t = -(dh_t h_t) / N_t, with the sign of the denominator. It uses the
// rounded h, whose errors are as small in the sum as in its terms; where that is not enough,
// exact.cuh recomputes the row.
DEVICE float store_row_terms(const BackwardParams& p, const BackwardTerms& terms,
                             const Chunk& chunk, int head, int t, float2 dot) {
  const int64_t at = terms.rows.row(head, chunk) + t;
  const float inflow = terms.rows.inflow[at];
  float inverse = terms.scale, delta = 0, spread = 0;
  if (p.normalized) {
    const float total = static_cast<const float*>(p.total)[(chunk.row + t) * p.H + head];
    const float floor = terms.rows.floor[at];
    inverse = terms.scale / divisor(total, floor, p.eps);
    if (p.normalizer_grad && fabsf(total) > floor) {
      delta = -copysignf(dot.x * inverse, dot.x * inverse * total);
      spread = dot.y * inverse * inverse;
    }
    terms.delta[at] = delta, terms.n_weight[at] = inflow * delta;
  }
  if (terms.spread != nullptr) terms.spread[at] = spread;
  terms.weight[at] = inflow * inverse, terms.inverse[at] = inverse;
  return spread;
}

// Clears the counters of the kernels that follow; one thread block calls it.
DEVICE void clear_counters(const BackwardTerms& terms) {
  if (threadIdx.x < 6 && terms.taken != nullptr) terms.taken[threadIdx.x] = 0;
  if (threadIdx.x > 0) return;
  if (terms.count != nullptr) *terms.count = 0;
  if (terms.shut_count != nullptr) *terms.shut_count = 0;
}

// One thread block handles a chunk of a head.
template <typename IO>
__global__ void __launch_bounds__(kRowThreads) row_gradients(const BackwardParams p,
                                                             const BackwardTerms terms) {
  __shared__ float2 dots[kLongestChunk];
  if (blockIdx.x == 0) clear_counters(terms);
  const int head = int(blockIdx.x % unsigned(p.H));
  const int64_t slot = blockIdx.x / unsigned(p.H);
  const Chunk chunk = terms.rows.chunks.at(slot);
  if (p.normalized && p.normalizer_grad) {
    find_dots<IO>(dots, p, chunk, head);
    __syncthreads();
  }
  float spreads = 0;
  for (int t = threadIdx.x; t < chunk.steps; t += kRowThreads) {
    spreads += store_row_terms(p, terms, chunk, head, t, dots[t]);
  }
  if (terms.spread == nullptr) return;
  spreads = block_sum<kRowThreads>(spreads);
  if (threadIdx.x == 0) terms.spreads[terms.rows.slot(head, slot)] = spreads;
}

}  // namespace flashcell::cuda
