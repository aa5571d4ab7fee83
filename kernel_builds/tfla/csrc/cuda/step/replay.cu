// One decoding step that reads C and writes it only if its row's ring of steps is full: replay.py
// has the equations. A thread block takes 128 columns of a head. The ring's values, scaled by their
// weights, lie in shared memory; so do its keys, 128 rows at a time, where C is written. All that
// is small is written by a second kernel, which starts when no thread block reads it any more.
#include "head.cuh"
#include "run.h"

namespace flashcell::cuda {

extern __shared__ __align__(16) char memory[];

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kMostSteps = 16;
constexpr int kRows = 16;              // neighbouring rows of C that a thread has in flight
constexpr int kPass = kWarps * kRows;  // rows that a thread block has in flight
constexpr int kColumns = 128;          // of a thread block; each lane has four
using Four = Row<32, 4, 1>;

DEVICE float sum_of_warp(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}
DEVICE void add(float4& sum, float x, const float4& y) {
  sum.x += x * y.x, sum.y += x * y.y, sum.z += x * y.z, sum.w += x * y.w;
}
DEVICE void scale(float keep, float4& x) {
  x.x = times(keep, x.x), x.y = times(keep, x.y), x.z = times(keep, x.z), x.w = times(keep, x.w);
}
DEVICE float4 packed(const Four& x) { return make_float4(x.x[0], x.x[1], x.x[2], x.x[3]); }

// The gates of a head's ring; each lane has those of the entry of its number.
struct RingGates {
  int64_t first;  // entry of the head in [B, H, R]
  int used;
  float before, i, f;  // before: the state's m

  template <typename IO>
  DEVICE RingGates(const StepParams& p, const Head<IO>& head)
      : first(head.state * p.ring.steps), before(head.m_before()), i(0), f(0) {
    const int lane = threadIdx.x % 32;
    used = p.ring.used[head.state];
    if (lane < p.ring.steps) i = p.ring.i[first + lane], f = p.ring.f[first + lane];
  }
};

// What a head's ring makes of its state: decay C + the sum of weight k v over the entries, and m.
struct Replay {
  int count;   // entries that hold steps
  bool folds;  // whether the state is written
  float decay, m;
  float weight;  // of the entry whose number is the lane's; 0 for others

  DEVICE Replay(const StepParams& p, const RingGates& gates) {
    const int R = int(p.ring.steps), lane = threadIdx.x % 32;
    count = gates.used < 0 ? 0 : gates.used > R ? R : gates.used;
    folds = p.q.data == nullptr ? count > 0 : count == R;
    const float own_f = at_least(kShut, log_sigmoid(gates.f));
    const float own_i = p.exponential ? at_least(float(kNever), gates.i) : log_sigmoid(gates.i);
    double all = 0, after = 0,
           best = gates.before;  // log decay of the state, and of the lane's k v
    for (int j = 0; j < count; ++j) {
      const double log_f = __shfl_sync(~0u, own_f, j), log_i = __shfl_sync(~0u, own_i, j);
      all += log_f;
      if (j > lane) after += log_f;
      const double carried = best + log_f;
      if (p.exponential) best = carried < log_i || isnan(log_i) ? log_i : carried;
    }
    m = float(best);  // the factors use the rounded m
    const bool empty = gates.before < float(kNever);
    decay = empty ? 0.0f : expf(float(all + double(gates.before) - double(m)));
    weight = lane < count ? expf(float(after + double(own_i) - double(m))) : 0.0f;
  }
};

// Computes h for 128 columns of a head, to `unrounded` if an epilogue follows, and folds their part
// of C. kKey and kValue are K and V, or 0 if not known at compile time.
template <typename IO, int kKey, int kValue>
__global__ void __launch_bounds__(kThreads, 2) replay_kernel(const StepParams p, float* unrounded) {
  float* query = reinterpret_cast<float*>(memory);         // [K] rounded up to kPass, 0 past K
  __shared__ __align__(16) float keys[kMostSteps][kPass];  // of the rows in flight
  __shared__ float4 values[kMostSteps][32];                // times their weights
  __shared__ float products[kMostSteps + 2];  // q k of the entries, and of the step; q n
  __shared__ float4 parts[kWarps][32];
  const int K = kKey > 0 ? kKey : int(p.K), V = kValue > 0 ? kValue : int(p.V);
  const int blocks = (V + kColumns - 1) / kColumns;
  const int tile = int(blockIdx.x) % blocks * kColumns, column = tile + Four::column(0);
  const Head<IO> head(p, int(blockIdx.x) / blocks, K);
  const int thread = cuda::thread<kThreads>(), warp = thread / 32, lane = thread % 32;
  const bool inside = kValue > 0 || column < V;
  float* C = static_cast<float*>(p.next_C) + int64_t(head.state) * K * V;
  C += int64_t(warp * kRows) * V + column;
  const auto row_of = [&](int row, int u) { return row + warp * kRows + u; };
  head.fetch();
  pdl_wait();

  const RingGates gates(p, head);
  const bool steps = p.q.data != nullptr;
  for (int r = thread; r < (K + kPass - 1) / kPass * kPass; r += kThreads) {
    query[r] = steps && r < K ? to_float(head.q[r]) : 0.0f;
  }
  __syncthreads();  // also keeps the compiler from loading a gate after C
  float4 x[kRows];
  const auto has = [&](int row, int u) { return inside && (kKey > 0 || row_of(row, u) < K); };
  const auto load = [&](int row, int u) {
    const float* from = C + int64_t(row + u) * V;
    x[u] = has(row, u) ? __ldcs(reinterpret_cast<const float4*>(from)) : float4{};
  };
#pragma unroll
  for (int u = 0; u < kRows; ++u) load(0, u);

  const Replay ring(p, gates);
  const IO* ring_k = static_cast<const IO*>(p.ring.k) + gates.first * K;
  const IO* ring_v = static_cast<const IO*>(p.ring.v) + gates.first * V;
  float sums[kMostSteps / kWarps + 1] = {};  // the warp's products with q: entries, k, and then n
  for (int r = 0; r < K; r += 128) {
    const float4 q = *reinterpret_cast<const float4*>(&query[r + 4 * lane]);
#pragma unroll
    for (int e = 0; e <= kMostSteps / kWarps; ++e) {
      const int j = warp + e * kWarps;
      Four key{};
      if (j < ring.count) key.load(ring_k + int64_t(j) * K + r, K - r);
      if (j == ring.count) key.load(head.k + r, K - r);
      if (j == ring.count + 1 && head.n != nullptr) key.load(head.n + r, K - r);
      sums[e] += key.x[0] * q.x + key.x[1] * q.y + key.x[2] * q.z + key.x[3] * q.w;
    }
  }
#pragma unroll
  for (int e = 0; e <= kMostSteps / kWarps; ++e) {
    const int j = warp + e * kWarps;
    const float sum = sum_of_warp(sums[e]), weight = __shfl_sync(~0u, ring.weight, j % 32);
    if (j > ring.count + 1) continue;
    const bool removed = j < ring.count && weight == 0;  // even NaN
    if (lane == 0) products[j] = removed ? 0.0f : sum;
    if (j >= ring.count) continue;
    Four value;
    value.load(ring_v + int64_t(j) * V + tile, V - tile);
    values[j][lane] = packed(value);
    scale(weight, values[j][lane]);
  }
  Four value;
  value.load(at<IO>(p.v, head.b, head.h) + tile, V - tile);
  const Factors factors = find_factors(p, *head.i, *head.f, ring.m);
  __syncthreads();
  pdl_launch_dependents();

  float4 total{};
#pragma unroll 1
  for (int row = 0; row < K; row += kPass) {
    if (ring.folds) {
      __syncthreads();
      for (int j = warp; j < ring.count; j += kWarps) {
        const float weight = __shfl_sync(~0u, ring.weight, j);
        Four key;
        key.load(ring_k + int64_t(j) * K + row, K - row);
        float4& to = *reinterpret_cast<float4*>(&keys[j][4 * lane]);
        to = weight == 0 ? float4{} : packed(key);
      }
      __syncthreads();
#pragma unroll
      for (int u = 0; u < kRows; ++u) scale(ring.decay, x[u]);
#pragma unroll 1
      for (int j = 0; j < ring.count; ++j) {
        const float4 v = values[j][lane];
#pragma unroll
        for (int u = 0; u < kRows; u += 4) {
          const float4 k = *reinterpret_cast<const float4*>(&keys[j][row_of(0, u)]);
          add(x[u], k.x, v), add(x[u + 1], k.y, v), add(x[u + 2], k.z, v), add(x[u + 3], k.w, v);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      add(total, query[row_of(row, u)], x[u]);
      float4* to = reinterpret_cast<float4*>(C + int64_t(row + u) * V);
      if (ring.folds && has(row, u)) __stcs(to, x[u]);
      if (row + kPass < K) load(row + kPass, u);
    }
  }
  parts[warp][lane] = total;
  __syncthreads();
  if (warp > 0 || !steps) return;

#pragma unroll
  for (int w = 1; w < kWarps; ++w) add(total, 1, parts[w][lane]);
  if (!ring.folds) {  // else C already holds the ring
    scale(ring.decay, total);
    for (int j = 0; j < ring.count; ++j) add(total, products[j], values[j][lane]);
  }
  const float k_q = products[ring.count], query_scale = rsqrtf(float(K));
  float factor = query_scale;
  if (p.normalized) {
    const float own = lane < ring.count ? times(ring.weight, products[lane]) : 0.0f;
    const float n_q = times(ring.decay, products[ring.count + 1]) + sum_of_warp(own);
    const float total_q = times(factors.keep, n_q) + factors.add * k_q;  // n q with the new n
    factor /= divisor(total_q * query_scale, expf(-factors.m), p.eps);
  }
  scale(factors.keep, total);
  add(total, factors.add * k_q, packed(value));
  value = {total.x * factor, total.y * factor, total.z * factor, total.w * factor};
  const int64_t out = int64_t(head.state) * V + tile;
  if (unrounded == nullptr) {
    value.store(static_cast<IO*>(p.h) + out, V - tile);
  } else {
    value.store(unrounded + out, V - tile);
  }
}

// Writes a head's n and m if its ring is folded, then the step's entry, and then the epilogue.
template <typename IO>
__global__ void __launch_bounds__(kFinishThreads) finish_replay_kernel(const StepParams p,
                                                                       const float* unrounded) {
  __shared__ float weights[32];
  const int K = int(p.K), V = int(p.V), thread = cuda::thread<kFinishThreads>();
  const Head<IO> head(p, int(blockIdx.x), K);
  pdl_launch_dependents();
  const RingGates gates(p, head);
  const Replay ring(p, gates);
  if (thread < 32) weights[thread] = ring.weight;
  __syncthreads();  // all threads have read m and the gates
  pdl_wait();       // and the other kernel the ring, n and m
  IO* ring_k = static_cast<IO*>(p.ring.k) + gates.first * K;
  IO* ring_v = static_cast<IO*>(p.ring.v) + gates.first * V;
  const bool steps = p.q.data != nullptr;
  const int entry = ring.folds ? 0 : ring.count;
  for (int r = thread; r < K; r += kFinishThreads) {
    if (ring.folds && p.normalized) {
      float n = times(ring.decay, head.n[r]);
      for (int j = 0; j < ring.count; ++j) {
        n += times(weights[j], to_float(ring_k[int64_t(j) * K + r]));
      }
      static_cast<float*>(p.next_n)[int64_t(head.state) * K + r] = n;
    }
    if (steps) ring_k[int64_t(entry) * K + r] = head.k[r];
  }
  const IO* value = at<IO>(p.v, head.b, head.h);
  for (int c = thread; steps && c < V; c += kFinishThreads) {
    ring_v[int64_t(entry) * V + c] = value[c];
  }
  if (thread == 0) {
    if (ring.folds && p.exponential) static_cast<float*>(p.next_m)[head.state] = ring.m;
    if (steps) p.ring.i[gates.first + entry] = *head.i, p.ring.f[gates.first + entry] = *head.f;
    p.ring.used[head.state] = steps ? entry + 1 : 0;
  }
  if (unrounded != nullptr) head.finish(p, unrounded);
}

}  // namespace

template <typename IO>
void run_replay(const StepParams& p, const Device& device, void* scratch, cudaStream_t stream) {
  const bool pdl = device.code.arch >= 90;  // older code does not wait in its kernels
  const int64_t states = p.B * p.H, padded = (p.K + kPass - 1) / kPass * kPass;
  float* unrounded = p.epilogue.any() ? static_cast<float*>(scratch) : nullptr;
  Grid grid{states * ((p.V + kColumns - 1) / kColumns), kThreads, 0, stream, pdl};
  grid.shared_bytes = int(padded * int64_t(sizeof(float)));
  auto kernel = replay_kernel<IO, 0, 0>;
  if (p.K == 256 && p.V == 512) kernel = replay_kernel<IO, 256, 512>;
  if (p.K == 128 && p.V == 256) kernel = replay_kernel<IO, 128, 256>;
  launch(kernel, grid, p, unrounded);
  launch(finish_replay_kernel<IO>, {states, kFinishThreads, 0, stream, pdl}, p, unrounded);
}
template void run_replay<bf16>(const StepParams&, const Device&, void*, cudaStream_t);
template void run_replay<fp16>(const StepParams&, const Device&, void*, cudaStream_t);
template void run_replay<float>(const StepParams&, const Device&, void*, cudaStream_t);

}  // namespace flashcell::cuda
