// What the kernels of the backward pass hand to each other. Slots are those of Chunks.
#pragma once
#include "mma.cuh"
#include "rows.cuh"

namespace flashcell::cuda {

struct BackwardTerms {
  Rows rows;
  float scale;               // K^-1/2
  float *inverse, *delta;    // [H, rows] scale / N and scale delta; null: scale, and 0
  float *weight, *n_weight;  // [H, rows] of q_t in dC and in dn: inflow times them
  void *C, *dC;              // [H, slots, K, V] io: before the chunk, and the gradient after it
  float *n, *dn;             // [H, slots, K], or null

  // Of its sequence.
  DEVICE bool is_last(int64_t slot) const {
    if (slot + 1 == rows.chunks.slots()) return true;
    const Chunk next = rows.chunks.at(slot + 1);
    return next.number == 0 || next.steps == 0;
  }
};

// <x, y> of 16 bytes each.
template <typename IO>
DEVICE float piece_dot(const uint4& x, const uint4& y) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8 / int(sizeof(IO)); ++i) {
    const float2 a = reinterpret_cast<const Pair<IO>*>(&x)[i].floats();
    const float2 b = reinterpret_cast<const Pair<IO>*>(&y)[i].floats();
    sum = fmaf(a.x, b.x, fmaf(a.y, b.y, sum));
  }
  return sum;
}

}  // namespace flashcell::cuda
