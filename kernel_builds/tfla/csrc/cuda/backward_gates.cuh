// The gates' gradients from what flows into and out of every step: README, The backward pass.
#pragma once
#include "backward_terms.cuh"

namespace flashcell::cuda {

// A warp for a chunk of a head, heads next to each other as they lie. Later steps are in lower
// lanes.
inline constexpr int kGateWarps = 8;
__global__ void __launch_bounds__(32 * kGateWarps)
    gate_gradients(const BackwardParams p, const BackwardTerms terms) {
  const int64_t index = int64_t(blockIdx.x) * kGateWarps + threadIdx.x / 32;
  const int64_t slot = index / p.H;
  const int head = int(index % p.H), lane = threadIdx.x % 32;
  if (slot >= terms.rows.chunks.slots()) return;
  const Chunk chunk = terms.rows.chunks.at(slot);
  const int64_t first = terms.rows.row(head, chunk);
  float *di = static_cast<float*>(p.di), *df = static_cast<float*>(p.df);
  for (int t = chunk.steps + lane; t < chunk.rows; t += 32) {
    const int64_t at = (chunk.row + t) * p.H + head;
    di[at] = 0, df[at] = 0;
  }
  if (chunk.steps == 0) return;
  float crossing = terms.anchor[terms.rows.slot(head, slot)];
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
