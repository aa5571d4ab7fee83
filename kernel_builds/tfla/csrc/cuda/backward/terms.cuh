// What the kernels of the backward pass hand to each other. Slots are those of Chunks.
#pragma once
#include "../gates/rows.cuh"
#include "common/cuda/ptx/mma.cuh"

namespace flashcell::cuda {

struct BackwardTerms {
  Rows rows;
  float scale;               // K^-1/2
  float *inverse, *delta;    // [H, rows] scale / N and scale delta, or null for 0
  float *weight, *n_weight;  // [H, rows] of q_t in dC and in dn: inflow times them
  float *spread, *spreads;   // [H, rows] how far off delta^2 may be, in roundings of h; [H, slots]
                             // sums; or null
  const void* C;             // [H, slots, K, V] io: before the chunk
  const float* n;            // [H, slots, K], or null
  void* dC;                  // likewise: the gradient after the chunk
  float* dn;
  float *in, *out;  // [H, rows] q dq and k dk, where blocks of rows work them out
  int* taken;       // of dq's, dk's and dv's items so far, of chunks and of precise ones, or null
  int *shut, *shut_count;  // [slots * H] chunks with a shut forget gate, and how many; or null
  int *listed, *count;  // [slots * H] chunks whose E is taken in two pieces, and how many; or null

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
template <typename IO>
DEVICE void load_eight(float (&to)[8], const IO* from) {
  if constexpr (sizeof(IO) == 4) {
    const float4 low = load_four(from), high = load_four(from + 4);
    to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
    to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
  } else {
    const uint4 words = reinterpret_cast<const uint4&>(*from);
    const uint32_t each[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = Pair<IO>{each[i]}.floats();
      to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
    }
  }
}

// A thread's part of <x, y>, of `count` elements, a multiple of eight.
template <int kThreads, typename X, typename Y>
DEVICE float part_of_dot(const X* x, const Y* y, int64_t count, int thread) {
  float sum = 0;
#pragma unroll 4
  for (int64_t i = thread * 8; i < count; i += kThreads * 8) {
    float a[8], b[8];
    load_eight(a, x + i), load_eight(b, y + i);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum = fmaf(a[j], b[j], sum);
  }
  return sum;
}
template <typename T>
DEVICE T warp_sum(T x) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}
// Of all threads of a block, in each of them.
template <int kThreads, typename T>
DEVICE T block_sum(T x) {
  __shared__ T parts[kThreads / 32];
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  T sum = 0;
  for (const T part : parts) sum += part;
  return sum;
}

}  // namespace flashcell::cuda
