// One decoding step that reads C and writes it only if its row's ring of steps is full: replay.py
// has the equations. A thread block takes 128 columns of a head, or all of them where there are
// enough heads for that: then it reads whole rows, which memory does faster. The ring's values,
// scaled by their weights, lie in shared memory; so do its keys, of the rows in flight, where C is
// written. All that is small is written at the end, when no thread block reads it any more: by a
// second kernel if several share a head.
#include "head.cuh"
#include "run.h"

namespace flashcell::cuda {

extern __shared__ __align__(16) char memory[];

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kMostSteps = 16;
constexpr int kPadded = 128;              // q is followed by zeros up to a multiple of it
constexpr int kTwoBlocks = 2 * 52 << 10;  // shared memory of two blocks with whole heads, at most
using Four = Row<32, 4, 1>;

// A thread block has kParts times 128 columns; each lane has four of each part, of kRows
// neighbouring rows of C in flight, and the block kPass rows.
template <int kParts>
struct ReplayTile {
  static constexpr int kColumns = 128 * kParts, kRows = 16 / kParts, kPass = kWarps * kRows;
  static constexpr int kValueBytes = kMostSteps * kColumns * int(sizeof(float));
};

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

// Writes a head's n and m if its ring is folded, then the step's entry, and then the epilogue.
// `weights` are those of the ring's entries. All other reads of the ring, n and m must be over.
template <typename IO>
DEVICE void finish_replay(const StepParams& p, const Head<IO>& head, const RingGates& gates,
                          const Replay& ring, const float* weights, const float* unrounded) {
  const int K = int(p.K), V = int(p.V), thread = cuda::thread<kFinishThreads>();
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

// Computes h for the block's columns of a head, to `unrounded` if an epilogue follows, and folds
// their part of C. kKey and kValue are K and V, or 0 if not known at compile time. A block with all
// columns also does the rest of the step.
template <typename IO, int kKey, int kValue, int kParts>
__global__ void __launch_bounds__(kThreads, 2) replay_kernel(const StepParams p, float* unrounded) {
  using Tile = ReplayTile<kParts>;
  constexpr int kRows = Tile::kRows, kPass = Tile::kPass, kColumns = Tile::kColumns;
  constexpr bool kWhole = kColumns == kValue;
  static_assert(kParts == 1 || (kWhole && kKey % kPass == 0 && kThreads == kFinishThreads));
  const int K = kKey > 0 ? kKey : int(p.K), V = kValue > 0 ? kValue : int(p.V);
  const int padded = (K + kPadded - 1) / kPadded * kPadded;
  using Values = float4[32 * kParts];
  float* query = reinterpret_cast<float*>(memory);             // [padded], 0 past K
  Values* values = reinterpret_cast<Values*>(query + padded);  // [kMostSteps], times their weights
  __shared__ __align__(16) float keys[kMostSteps][kPass];      // of the rows in flight
  __shared__ float products[kMostSteps + 2];  // q k of the entries, and of the step; q n
  __shared__ Values parts[kWarps];
  __shared__ float weights[32];
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
  for (int r = thread; r < padded; r += kThreads) {
    query[r] = steps && r < K ? to_float(head.q[r]) : 0.0f;
  }
  __syncthreads();  // also keeps the compiler from loading a gate after C
  float4 x[kRows][kParts];
  const auto has = [&](int row, int u) { return inside && (kKey > 0 || row_of(row, u) < K); };
  const auto load = [&](int row, int u) {
    const float4* from = reinterpret_cast<const float4*>(C + int64_t(row + u) * V);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      x[u][part] = has(row, u) ? __ldcs(from + 32 * part) : float4{};
    }
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
#pragma unroll
    for (int first = 0; first < kColumns; first += 128) {
      Four value;
      value.load(ring_v + int64_t(j) * V + tile + first, V - tile - first);
      float4& to = values[j][first / 4 + lane];
      to = packed(value);
      scale(weight, to);
    }
  }
  // The first warps compute h, each of one part.
  const int own = tile + (warp < kParts ? 128 * warp : 0);
  Four value;
  value.load(at<IO>(p.v, head.b, head.h) + own, V - own);
  if (kWhole && thread < 32) weights[thread] = ring.weight;
  const Factors factors = find_factors(p, *head.i, *head.f, ring.m);
  __syncthreads();
  pdl_launch_dependents();

  float4 totals[kParts] = {};
#pragma unroll 1
  for (int row = 0; row < K; row += kPass) {
    if (ring.folds) {
      __syncthreads();
      for (int j = warp; j < ring.count; j += kWarps) {
        const float weight = __shfl_sync(~0u, ring.weight, j);
        if (4 * lane >= kPass) continue;
        Four key;
        key.load(ring_k + int64_t(j) * K + row, K - row);
        float4& to = *reinterpret_cast<float4*>(&keys[j][4 * lane]);
        to = weight == 0 ? float4{} : packed(key);
      }
      __syncthreads();
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) scale(ring.decay, x[u][part]);
      }
#pragma unroll 1
      for (int j = 0; j < ring.count; ++j) {
#pragma unroll
        for (int u = 0; u < kRows; u += 4) {
          const float4 k = *reinterpret_cast<const float4*>(&keys[j][row_of(0, u)]);
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            const float4 v = values[j][32 * part + lane];
            add(x[u][part], k.x, v), add(x[u + 1][part], k.y, v);
            add(x[u + 2][part], k.z, v), add(x[u + 3][part], k.w, v);
          }
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const float q = query[row_of(row, u)];
      float4* to = reinterpret_cast<float4*>(C + int64_t(row + u) * V);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        add(totals[part], q, x[u][part]);
        if (ring.folds && has(row, u)) __stcs(to + 32 * part, x[u][part]);
      }
      if (row + kPass < K) load(row + kPass, u);
    }
  }
#pragma unroll
  for (int part = 0; part < kParts; ++part) parts[warp][32 * part + lane] = totals[part];
  __syncthreads();
  if (warp < kParts && steps) {
    float4 total{};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) add(total, 1, parts[w][32 * warp + lane]);
    if (!ring.folds) {  // else C already holds the ring
      scale(ring.decay, total);
      for (int j = 0; j < ring.count; ++j) add(total, products[j], values[j][32 * warp + lane]);
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
    const int64_t out = int64_t(head.state) * V + own;
    if (unrounded == nullptr) {
      value.store(static_cast<IO*>(p.h) + out, V - own);
    } else {
      value.store(unrounded + out, V - own);
    }
  }
  if constexpr (kWhole) {
    __syncthreads();  // all threads have read the ring and written h
    finish_replay(p, head, gates, ring, weights, unrounded);
  }
}

// What follows where several thread blocks share a head.
template <typename IO>
__global__ void __launch_bounds__(kFinishThreads) finish_replay_kernel(const StepParams p,
                                                                       const float* unrounded) {
  __shared__ float weights[32];
  const Head<IO> head(p, int(blockIdx.x), int(p.K));
  pdl_launch_dependents();
  const RingGates gates(p, head);
  const Replay ring(p, gates);
  if (threadIdx.x < 32) weights[threadIdx.x] = ring.weight;
  __syncthreads();  // all threads have read m and the gates
  pdl_wait();       // and the other kernel the ring, n and m
  finish_replay(p, head, gates, ring, weights, unrounded);
}

template <typename IO, int kKey, int kValue, int kParts>
void launch_replay(const StepParams& p, bool pdl, float* unrounded, cudaStream_t stream) {
  using Tile = ReplayTile<kParts>;
  const int64_t states = p.B * p.H, padded = (p.K + kPadded - 1) / kPadded * kPadded;
  const int64_t tiles = (p.V + Tile::kColumns - 1) / Tile::kColumns;
  const int bytes = int(padded * int64_t(sizeof(float))) + Tile::kValueBytes;
  launch(replay_kernel<IO, kKey, kValue, kParts>, {states * tiles, kThreads, bytes, stream, pdl}, p,
         unrounded);
  if constexpr (Tile::kColumns != kValue) {
    launch(finish_replay_kernel<IO>, {states, kFinishThreads, 0, stream, pdl}, p, unrounded);
  }
}

}  // namespace

template <typename IO>
void run_replay(const StepParams& p, const Device& device, void* scratch, cudaStream_t stream) {
  const bool pdl = device.code.arch >= 90;  // older code does not wait in its kernels
  float* unrounded = p.epilogue.any() ? static_cast<float*>(scratch) : nullptr;
  // A thread block has a whole head where each SM has at least 1.5 heads, and room for two blocks.
  const bool many = 2 * p.B * p.H >= 3 * int64_t(device.sms) && device.shared_bytes >= kTwoBlocks;
  if (p.K == 256 && p.V == 512) {
    if (many) return launch_replay<IO, 256, 512, 4>(p, pdl, unrounded, stream);
    return launch_replay<IO, 256, 512, 1>(p, pdl, unrounded, stream);
  }
  if (p.K == 128 && p.V == 256) {
    if (many) return launch_replay<IO, 128, 256, 2>(p, pdl, unrounded, stream);
    return launch_replay<IO, 128, 256, 1>(p, pdl, unrounded, stream);
  }
  launch_replay<IO, 0, 0, 1>(p, pdl, unrounded, stream);
}
template void run_replay<bf16>(const StepParams&, const Device&, void*, cudaStream_t);
template void run_replay<fp16>(const StepParams&, const Device&, void*, cudaStream_t);
template void run_replay<float>(const StepParams&, const Device&, void*, cudaStream_t);

}  // namespace flashcell::cuda
