// The gradients of the gates, from what flows into and out of every step: README.md, "Gradients".
#pragma once
#include "terms.cuh"

namespace flashcell::cuda {

// One thread block handles a chunk of a head. All of it computes what crosses the chunk's end; then
// each thread has one step, with later steps in lower threads.
inline constexpr int kGateThreads = kLongestChunk;
// df is a difference of sums (in - out). The rounding of these sums, that of the 16-bit operands,
// must stay small compared with df. A chunk is listed for recomputation by shut_gates if a forget
// gate is below kShutGate, or if df is smaller than 1 / kLostShare of what the size of the sums
// suggests, comparing root mean squares over the chunk.
inline constexpr float kShutGate = -1, kLostShare = 8;

DEVICE float gate_slope(float x) { return 1 / (1 + expf(x)); }  // derivative of logsigmoid

// Returns the thread's part of <C, dC> + <n, dn> after the chunk; dC is rounded as in the products.
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
  __shared__ float totals[kGateThreads / 32];
  __shared__ bool stops[kGateThreads / 32];
  const int64_t slot = blockIdx.x / unsigned(p.H);
  const int head = int(blockIdx.x % unsigned(p.H)), lane = threadIdx.x % 32;
  const Chunk chunk = terms.rows.chunks.at(slot);
  const int t = kGateThreads - 1 - int(threadIdx.x);
  const int64_t row = chunk.row + t, at = row * p.H + head;
  float *di = static_cast<float*>(p.di), *df = static_cast<float*>(p.df);
  const bool exists = t < chunk.steps;
  if (!exists && t < chunk.rows) di[at] = 0, df[at] = 0;
  if (chunk.steps == 0) return;

  const auto value = [&](const Strided& gate) {
    const int64_t from = row / p.T * gate.batch + row % p.T * gate.time + head * gate.head;
    return exists ? static_cast<const float*>(gate.data)[from] : 0.f;
  };
  const bool held = exists && p.hold && p.hold[row];
  const float f = value(p.f), i = value(p.i);
  const float slope_i = p.exponential ? float(!(i < float(kNever))) : gate_slope(i);
  const int64_t flow = terms.rows.row(head, chunk) + t;
  const float out = exists ? terms.out[flow] : 0.f;
  bool stopped = exists && p.reset && p.reset[row];  // nothing crosses a reset
  const bool shut = f < kShutGate && !held && !stopped;
  const float in = exists ? terms.in[flow] : 0.f;
  float total = exists && !stopped ? in - out : 0.f;
  float crossing = block_sum<kGateThreads>(part_of_crossing<IO>(p, terms, chunk, slot, head));

#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const float later = __shfl_up_sync(~0u, total, by);
    const bool stop = __shfl_up_sync(~0u, int(stopped), by);
    if (lane >= by && !stopped) total += later, stopped = stop;
  }
  if (lane == 31) {
    totals[threadIdx.x / 32] = total, stops[threadIdx.x / 32] = stopped;
  }
  __syncthreads();
  for (int warp = 0; warp < int(threadIdx.x) / 32; ++warp) {
    crossing = totals[warp] + (stops[warp] ? 0.f : crossing);
  }
  if (!stopped) total += crossing;
  const float slope_f = exists && !held ? gate_slope(f) : 0.f;
  const float sizes = block_sum<kGateThreads>(in * in + out * out);
  const float slopes = block_sum<kGateThreads>(slope_f * slope_f);
  const float found =
      block_sum<kGateThreads>(slope_f == 0 ? 0.f : total * slope_f * total * slope_f);
  const float shuts = block_sum<kGateThreads>(shut ? 1.f : 0.f);
  const bool lost = sizes * slopes > kLostShare * kLostShare * found;
  if ((shuts > 0 || lost) && threadIdx.x == 0) {
    terms.shut[atomicAdd(terms.shut_count, 1)] = int(blockIdx.x);
  }
  if (!exists) return;
  di[at] = held ? 0.f : out * slope_i;
  df[at] = held ? 0.f : total * slope_f;
}

}  // namespace flashcell::cuda
