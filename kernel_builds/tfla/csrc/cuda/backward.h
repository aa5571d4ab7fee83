// What the kernels of the backward pass hand to each other. Slots are those of Chunks.
#pragma once
#include "rows.cuh"

namespace flashcell::cuda {

struct BackwardTerms {
  Rows rows;
  float scale;               // K^-1/2
  float *inverse, *delta;    // [H, rows] scale / N and scale delta; null: scale, and 0
  float *weight, *n_weight;  // [H, rows] of q_t in dC and in dn: inflow times them
  const void *C, *dC;        // [H, slots, K, V] io: before the chunk, and the gradient after it
  const float *n, *dn;       // [H, slots, K], or null
  const float* anchors;      // [H, slots, anchor_parts], which add up to <C, dC> + <n, dn> after it
  int anchor_parts;

  // Of its sequence.
  DEVICE bool is_last(int64_t slot) const {
    if (slot + 1 == rows.chunks.slots()) return true;
    const Chunk next = rows.chunks.at(slot + 1);
    return next.number == 0 || next.steps == 0;
  }
  // In every lane of a warp.
  DEVICE float anchor(int head, int64_t slot) const {
    const float* parts = anchors + rows.slot(head, slot) * anchor_parts;
    float sum = 0;
    for (int i = threadIdx.x % 32; i < anchor_parts; i += 32) sum += parts[i];
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) sum += __shfl_xor_sync(~0u, sum, mask);
    return sum;
  }
};

}  // namespace flashcell::cuda
