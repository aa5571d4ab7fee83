// The terms of rows that the backward needs besides the gates (backward/rows.cuh), for narrow
// heads: a thread block has several heads of a chunk, whose rows lie side by side.
#pragma once
#include "../backward/rows.cuh"

namespace flashcell::cuda {

constexpr int kHeadsAtOnce = 8;

// kPieces: lanes of a row of h, of 8 elements each, a power of two.
template <typename IO, int kPieces>
__global__ void __launch_bounds__(kRowThreads) narrow_rows(const BackwardParams p,
                                                           const BackwardTerms terms) {
  constexpr int kAtOnce = kRowThreads / (kHeadsAtOnce * kPieces);  // rows
  __shared__ float2 dots[kHeadsAtOnce][kTile];
  __shared__ float spreads[kHeadsAtOnce][kTile / 32];
  if (blockIdx.x == 0) clear_counters(terms);
  const unsigned groups = unsigned(p.H + kHeadsAtOnce - 1) / kHeadsAtOnce;
  const int first = int(blockIdx.x % groups) * kHeadsAtOnce;
  const int64_t slot = blockIdx.x / groups;
  const Chunk chunk = terms.rows.chunks.at(slot);
  if (p.normalized && p.normalizer_grad) {
    const int piece = threadIdx.x % kPieces, own = threadIdx.x / kPieces % kHeadsAtOnce;
    const int head = first + own;
    const bool exists = head < p.H && piece * 8 < p.V;
    const IO *dh = static_cast<const IO*>(p.dh), *h = static_cast<const IO*>(p.h);
#pragma unroll 4
    for (int t = threadIdx.x / (kPieces * kHeadsAtOnce); t < kTile; t += kAtOnce) {
      float2 dot{};
      if (exists && t < chunk.steps) {
        const int64_t at = ((chunk.row + t) * p.H + head) * p.V + piece * 8;
        float a[8], b[8];
        load_eight(a, dh + at), load_eight(b, h + at);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float term = a[i] * b[i];
          dot.x += term, dot.y = fmaf(term, term, dot.y);
        }
      }
#pragma unroll
      for (int mask = 1; mask < kPieces; mask *= 2) {
        dot.x += __shfl_xor_sync(~0u, dot.x, mask);
        dot.y += __shfl_xor_sync(~0u, dot.y, mask);
      }
      if (piece == 0) dots[own][t] = dot;
    }
    __syncthreads();
  }
  const int t = threadIdx.x % kTile, half = t / 32;
#pragma unroll
  for (int own = threadIdx.x / kTile; own < kHeadsAtOnce; own += kRowThreads / kTile) {
    float spread = 0;
    if (first + own < p.H && t < chunk.steps) {
      spread = store_row_terms(p, terms, chunk, first + own, t, dots[own][t]);
    }
    spread = warp_sum(spread);
    if (threadIdx.x % 32 == 0) spreads[own][half] = spread;
  }
  if (terms.spread == nullptr) return;
  __syncthreads();
  const int head = first + int(threadIdx.x);
  if (threadIdx.x < kHeadsAtOnce && head < p.H) {
    terms.spreads[terms.rows.slot(head, slot)] = spreads[threadIdx.x][0] + spreads[threadIdx.x][1];
  }
}

}  // namespace flashcell::cuda
