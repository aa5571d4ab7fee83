// What the kernels of the backward pass hand to each other. Slots are those of Chunks.
#pragma once
#include "mma.cuh"
#include "rows.cuh"

namespace flashcell::cuda {

struct BackwardTerms {
  Rows rows;
  float scale;               // K^-1/2
  float *inverse, *delta;    // [H, rows] scale / N and scale delta, or null for 0
  float *weight, *n_weight;  // [H, rows] of q_t in dC and in dn: inflow times them
  void *C, *dC;              // [H, slots, K, V] io: before the chunk, and the gradient after it
  float *n, *dn;             // [H, slots, K], or null
  float *in, *out;           // [H, rows] q dq and k dk, where blocks of rows work them out

  // Of its sequence.
  DEVICE bool is_last(int64_t slot) const {
    if (slot + 1 == rows.chunks.slots()) return true;
    const Chunk next = rows.chunks.at(slot + 1);
    return next.number == 0 || next.steps == 0;
  }
};

// A gradient arrives at h.
__host__ DEVICE bool has_h(const BackwardParams& p) {
  return p.dh != nullptr && p.q.data != nullptr;
}

template <typename IO>
DEVICE float4 load_four(const IO* from) {
  if constexpr (sizeof(IO) == 4) {
    return reinterpret_cast<const float4&>(*from);
  } else {
    const uint2 words = reinterpret_cast<const uint2&>(*from);
    const float2 low = Pair<IO>{words.x}.floats(), high = Pair<IO>{words.y}.floats();
    return {low.x, low.y, high.x, high.y};
  }
}

// A thread's part of <x, y>, of `count` elements, a multiple of four.
template <int kThreads, typename X, typename Y>
DEVICE float part_of_dot(const X* x, const Y* y, int64_t count, int thread) {
  float sum = 0;
#pragma unroll 8
  for (int64_t i = thread * 4; i < count; i += kThreads * 4) {
    const float4 a = load_four(x + i), b = load_four(y + i);
    sum = fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
  }
  return sum;
}
DEVICE float warp_sum(float x) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}

}  // namespace flashcell::cuda
