// The intermediate values that kernels of the backward pass pass to each other. Slots are those of
// Chunks (gates/rows.cuh).
#pragma once
#include "../gates/rows.cuh"
#include "common/cuda/ptx/mma.cuh"

namespace flashcell::cuda {

struct BackwardTerms {
  Rows rows;
  float scale;             // K^-1/2
  float *inverse, *delta;  // [H, rows] scale / N, and scale delta or null for 0
  // [H, rows] the factors of q_t in dC and in dn: the row's inflow times inverse, and times delta.
  float *weight, *n_weight;
  // [H, rows] estimated squared error of delta, in roundings of h, and [H, slots] its sums over
  // chunks; or null.
  float *spread, *spreads;
  const void* C;   // [H, slots, K, V] io: the state before the chunk
  const float* n;  // [H, slots, K], or null
  void* dC;        // the same for the gradient after the chunk
  float* dn;
  float *in, *out;  // [H, rows] q dq and k dk, if computed by blocks of rows
  // Number of items taken so far of dq, dk and dv, first of the common, then of the precise kernel;
  // or null.
  int* taken;
  int *shut, *shut_count;  // [slots * H] chunks with a shut forget gate, and how many; or null
  // [slots * H] chunks whose E must be split in two pieces, and how many; or null.
  int *listed, *count;

  // Whether the slot holds the last chunk of its sequence.
  DEVICE bool is_last(int64_t slot) const {
    if (slot + 1 == rows.chunks.slots()) return true;
    const Chunk next = rows.chunks.at(slot + 1);
    return next.number == 0 || next.steps == 0;
  }
};

// Whether h has a gradient.
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

// Returns a thread's part of the dot product of `count` elements, a multiple of eight.
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
// Returns the sum over all threads of the block, in each of them.
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
