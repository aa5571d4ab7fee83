// The gates' gradients from what flows into and out of every step: README, The backward pass.
#pragma once
#include "backward_terms.cuh"

namespace flashcell::cuda {

// A thread block for a chunk of a head: all of it for what crosses the chunk's end, then a warp for
// the steps, later ones in lower lanes.
inline constexpr int kGateThreads = 256;

// <C, dC> + <n, dn> after the chunk, of dC as the products have it, rounded: the thread's part.
template <typename IO>
DEVICE float part_of_crossing(const BackwardParams& p, const BackwardTerms& terms,
                              const Chunk& chunk, int64_t slot, int head) {
  const int64_t size = p.K * p.V, here = terms.rows.slot(head, slot);
  const int64_t last = chunk.sequence * p.H + head;
  const IO *C = static_cast<const IO*>(terms.C), *dC = static_cast<const IO*>(terms.dC);
  float sum = 0;
  const auto add = [&](const auto* x, const auto* dx, int64_t width) {
    sum += part_of_dot<kGateThreads>(x, dx, width, threadIdx.x);
  };
  if (!terms.is_last(slot)) {
    add(C + (here + 1) * size, dC + here * size, size);
    if (terms.n) add(terms.n + (here + 1) * p.K, terms.dn + here * p.K, p.K);
  } else if (p.dlast_C || p.dlast_n) {
    add(static_cast<const float*>(p.last_C) + last * size, dC + here * size, size);
    if (terms.n) add(static_cast<const float*>(p.last_n) + last * p.K, terms.dn + here * p.K, p.K);
  }
  return sum;
}

template <typename IO>
__global__ void __launch_bounds__(kGateThreads) gate_gradients(const BackwardParams p,
                                                               const BackwardTerms terms) {
  __shared__ float crossings[kGateThreads / 32];
  const int64_t slot = blockIdx.x / unsigned(p.H);
  const int head = int(blockIdx.x % unsigned(p.H)), lane = threadIdx.x % 32;
  const Chunk chunk = terms.rows.chunks.at(slot);
  const int64_t first = terms.rows.row(head, chunk);
  float *di = static_cast<float*>(p.di), *df = static_cast<float*>(p.df);
  for (int t = chunk.steps + int(threadIdx.x); t < chunk.rows; t += kGateThreads) {
    const int64_t at = (chunk.row + t) * p.H + head;
    di[at] = 0, df[at] = 0;
  }
  if (chunk.steps == 0) return;
  const float sum = warp_sum(part_of_crossing<IO>(p, terms, chunk, slot, head));
  if (lane == 0) crossings[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  float crossing = 0;
  for (const float part : crossings) crossing += part;
  for (int last = (chunk.steps - 1) / 32 * 32 + 31; last > 0; last -= 32) {
    const int t = last - lane;
    const bool exists = t < chunk.steps;
    const int64_t row = chunk.row + t;
    const float out = exists ? terms.out[first + t] : 0.f;
    bool stopped = exists && p.reset && p.reset[row];  // nothing crosses a reset
    float total = exists && !stopped ? terms.in[first + t] - out : 0.f;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const float later = __shfl_up_sync(~0u, total, by);
      const bool stop = __shfl_up_sync(~0u, int(stopped), by);
      if (lane >= by && !stopped) total += later, stopped = stop;
    }
    if (!stopped) total += crossing;
    crossing = __shfl_sync(~0u, total, 31);
    if (!exists) continue;
    const auto slope = [&](const Strided& gate) {  // of logsigmoid
      const int64_t at = row / p.T * gate.batch + row % p.T * gate.time + head * gate.head;
      return 1 / (1 + expf(static_cast<const float*>(gate.data)[at]));
    };
    const bool held = p.hold && p.hold[row];
    di[row * p.H + head] = held ? 0.f : p.exponential ? out : out * slope(p.i);
    df[row * p.H + head] = held ? 0.f : total * slope(p.f);
  }
}

}  // namespace flashcell::cuda
