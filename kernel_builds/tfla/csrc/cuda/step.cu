// One step: C is read once and written once, all of a thread block's part in flight at once.
//
// Two kernels, so that a state can be written where it stood: every thread block of the first reads
// n and m for itself. The second is launched when all have, and writes them while C is on its way;
// then it ends h, if there is an epilogue.
#include "early.cuh"
#include "epilogue.cuh"
#include "launch.h"
#include "step.h"

namespace flashcell::cuda {

extern __shared__ __align__(16) char memory[];

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kMostRows = 1024 / kThreads;  // of K, a thread
constexpr int kLanes = 16;                  // for a row of C, four columns each
constexpr int kTileColumns = 4 * kLanes, kRowsAtOnce = kThreads / kLanes;
constexpr int kUnroll = 16;  // rows of a thread in flight
// Of C, what is brought into the L2 while what came before still runs: of more some is gone again
// before it is read.
constexpr int64_t kFetchBytes = 4 << 20;
constexpr float kShut = -1000, kNever = -1e30f;

DEVICE float log_sigmoid(float x) { return fminf(x, 0.0f) - log1pf(expf(-fabsf(x))); }
DEVICE float at_least(float least, float x) { return x < least ? least : x; }    // NaN stays
DEVICE float times(float keep, float x) { return keep == 0 ? 0.0f : keep * x; }  // whatever x is

template <typename X>
DEVICE const X* at(const Strided& x, int b, int h) {
  return static_cast<const X*>(x.data) + b * x.batch + h * x.head;
}

// Into the L2, where a kernel that still runs may yet write: only a load has to wait for it.
DEVICE void fetch([[maybe_unused]] const void* from, [[maybe_unused]] int bytes) {
#if __CUDA_ARCH__ >= 900
  if (bytes > 0 && threadIdx.x == 0) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
  }
#endif
}
template <typename X>
DEVICE void fetch_row([[maybe_unused]] const X* row, [[maybe_unused]] int count) {
#if __CUDA_ARCH__ >= 900
  constexpr int kLine = 128 / int(sizeof(X));
  for (int c = int(threadIdx.x) * kLine; c < count; c += kThreads * kLine) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(row + c));
  }
#endif
}

// A head of a sequence, and where it is.
struct Head {
  int state, b, h;
  const float *i, *f, *m, *n;  // m and n null for 0

  DEVICE Head(const StepParams& p, int number)
      : state(number), b(number / int(p.H)), h(number % int(p.H)) {
    i = at<float>(p.i, b, h), f = at<float>(p.f, b, h);
    m = p.m ? static_cast<const float*>(p.m) + state : nullptr;
    n = p.n ? static_cast<const float*>(p.n) + state * p.K : nullptr;
  }
};

struct Gates {
  float input, forget, m;

  DEVICE explicit Gates(const Head& head)
      : input(*head.i), forget(*head.f), m(head.m ? *head.m : 0.0f) {}
  Gates() = default;
};

struct Factors {
  float keep, add, m;  // of the state, of k v, and the state's scale from now on

  DEVICE Factors(const StepParams& p, const Gates& gates) {
    const float log_f = at_least(kShut, log_sigmoid(gates.forget));
    if (!p.exponential) {
      keep = expf(log_f), add = expf(log_sigmoid(gates.input)), m = 0;
      return;
    }
    // m is rounded, and the factors make up for it
    const float log_i = at_least(kNever, gates.input);
    const double carried = double(log_f) + double(gates.m);
    m = float(carried < double(log_i) ? double(log_i) : carried);
    keep = gates.m < kNever ? 0.0f : expf(float(carried - double(m)));
    add = expf(float(double(log_i) - double(m)));
  }
};

// What a thread has of a head's rows.
struct Rows {
  float key[kMostRows], query[kMostRows], n[kMostRows];

  template <typename IO>
  DEVICE void load(const StepParams& p, const Head& head) {
    const IO *k = at<IO>(p.k, head.b, head.h), *q = at<IO>(p.q, head.b, head.h);
#pragma unroll
    for (int u = 0; u < kMostRows; ++u) {
      const int r = row(u);
      key[u] = r < p.K ? to_float(k[r]) : 0.0f, query[u] = r < p.K ? to_float(q[r]) : 0.0f;
      n[u] = r < p.K && head.n != nullptr ? head.n[r] : 0.0f;
    }
  }
  DEVICE static int row(int u) { return int(threadIdx.x) + u * kThreads; }
  DEVICE float next_n(const Factors& factors, int u) const {
    return times(factors.keep, n[u]) + factors.add * key[u];
  }
};

// C of kTileColumns of a head, and their h: in `unrounded` where an epilogue follows.
template <typename IO>
__global__ void __launch_bounds__(kThreads, 2) step_kernel(const StepParams p, float* unrounded,
                                                           int fetched) {
  using Four = Row<kLanes, 4, 1>;
  float2* rows = reinterpret_cast<float2*>(memory);       // [K] key and query
  float* n = reinterpret_cast<float*>(memory) + 2 * p.K;  // [K]
  __shared__ Gates gates;
  __shared__ float4 parts[kWarps][kLanes];
  __shared__ float n_q[kWarps];
  const int K = int(p.K), V = int(p.V), tiles = (V + kTileColumns - 1) / kTileColumns;
  const int part = int(blockIdx.x) % tiles, tile = part * kTileColumns;
  const Head head(p, int(blockIdx.x) / tiles);
  const int first = int(threadIdx.x) / kLanes, column = tile + Four::column(0);
  const bool inside = column < V;
  const IO *k = at<IO>(p.k, head.b, head.h), *q = at<IO>(p.q, head.b, head.h);
  const IO* v = at<IO>(p.v, head.b, head.h) + tile;
  const float* C = p.C ? static_cast<const float*>(p.C) + int64_t(head.state) * K * V : nullptr;
  float* next = static_cast<float*>(p.next_C) + int64_t(head.state) * K * V + column;

  if (C != nullptr) fetch(reinterpret_cast<const char*>(C) + int64_t(part) * fetched, fetched);
  fetch_row(head.i, 1), fetch_row(head.f, 1), fetch_row(k, K), fetch_row(q, K), fetch_row(v, 1);
  if (head.m != nullptr) fetch_row(head.m, 1);
  if (head.n != nullptr) fetch_row(head.n, K);
  wait_for_earlier();

  Gates own_gates;
  if (threadIdx.x == 0) own_gates = Gates(head);
  Rows own;
  own.load<IO>(p, head);
  Four value;
  value.load(v, V - tile);
  float4 old[kUnroll];
  const auto load = [&](int row) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int r = row + u * kRowsAtOnce;
      const bool exists = inside && r < K && C != nullptr;
      old[u] = exists ? __ldcs(reinterpret_cast<const float4*>(C + r * V + column)) : float4{};
    }
  };
  load(first);
  if (threadIdx.x == 0) gates = own_gates;
#pragma unroll
  for (int u = 0; u < kMostRows; ++u) {
    if (own.row(u) < K) rows[own.row(u)] = {own.key[u], own.query[u]}, n[own.row(u)] = own.n[u];
  }
  __syncthreads();
  let_later_start();  // n and m have been read: they are in shared memory

  const Factors factors(p, gates);
  float sum_n_q = 0;
#pragma unroll
  for (int u = 0; u < kMostRows; ++u) sum_n_q += own.next_n(factors, u) * own.query[u];
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum_n_q += __shfl_xor_sync(~0u, sum_n_q, mask);
  if (threadIdx.x % 32 == 0) n_q[threadIdx.x / 32] = sum_n_q;
#pragma unroll
  for (float& x : value.x) x *= factors.add;
  float sum[4] = {};
  for (int row = first; row < K; row += kUnroll * kRowsAtOnce) {
    if (row != first) load(row);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int r = row + u * kRowsAtOnce;
      if (!inside || r >= K) continue;
      const float2 key_query = rows[r];
      float x[4] = {old[u].x, old[u].y, old[u].z, old[u].w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] = times(factors.keep, x[e]) + key_query.x * value.x[e];
        sum[e] += key_query.y * x[e];
      }
      __stcs(reinterpret_cast<float4*>(next + r * V), make_float4(x[0], x[1], x[2], x[3]));
    }
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
#pragma unroll
    for (int mask = kLanes; mask < 32; mask *= 2) sum[e] += __shfl_xor_sync(~0u, sum[e], mask);
  }
  if (threadIdx.x % 32 < kLanes) {
    parts[threadIdx.x / 32][threadIdx.x % kLanes] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  }
  __syncthreads();
  if (threadIdx.x >= kLanes) return;
  Four total{};
  sum_n_q = 0;
  for (int w = 0; w < kWarps; ++w) {
    const float4 own = parts[w][threadIdx.x];
    total.x[0] += own.x, total.x[1] += own.y, total.x[2] += own.z, total.x[3] += own.w;
    sum_n_q += n_q[w];
  }
  const float query_scale = rsqrtf(float(K));
  float scale = query_scale;
  if (p.normalized) {
    scale /= fmaxf(fabsf(sum_n_q * query_scale), expf(-factors.m)) + float(p.eps);
  }
#pragma unroll
  for (float& x : total.x) x *= scale;
  const int64_t out = int64_t(head.state) * V + tile;
  if (unrounded == nullptr) {
    total.store(static_cast<IO*>(p.h) + out, V - tile);
  } else {
    total.store(unrounded + out, V - tile);
  }
}

// n and m of a head, which nobody reads any more; then its epilogue.
template <typename IO>
__global__ void __launch_bounds__(kThreads) finish_kernel(const StepParams p,
                                                          const float* unrounded) {
  const Head head(p, int(blockIdx.x));
  const int V = int(p.V);
  let_later_start();
  if (p.normalized) {
    const Gates gates(head);
    Rows own;
    own.load<IO>(p, head);
    const Factors factors(p, gates);
    float* next_n = static_cast<float*>(p.next_n) + head.state * p.K;
#pragma unroll
    for (int u = 0; u < kMostRows; ++u) {
      if (own.row(u) < p.K) next_n[own.row(u)] = own.next_n(factors, u);
    }
    __syncthreads();  // all have read m
    if (threadIdx.x == 0 && p.next_m != nullptr) {
      static_cast<float*>(p.next_m)[head.state] = factors.m;
    }
  }
  if (unrounded == nullptr) {
    wait_for_earlier();  // what comes later waits for this kernel alone
    return;
  }
  Row<kThreads, 4, 1> row, weight, gate;
  static_assert(kThreads * 4 >= 1024);  // the widest
  weight.template load_weight<IO>(p.epilogue, head.h, V);
  if (p.epilogue.out_gate.data != nullptr) {
    gate.load(gate_row<IO>(p.epilogue, head.b, 0, head.h), V);
  }
  wait_for_earlier();
  row.load(unrounded + int64_t(head.state) * V, V);
  finish_row<IO>(p.epilogue, row, weight, gate, V);
  row.store(static_cast<IO*>(p.h) + int64_t(head.state) * V, V);
}

}  // namespace

int64_t step_scratch(const StepParams& p) {
  return p.epilogue.any() ? p.B * p.H * p.V * int64_t(sizeof(float)) : 0;
}

template <typename IO>
void run_step(const StepParams& p, const Device& device, void* scratch, cudaStream_t stream) {
  const bool early = device.arch >= 90;  // else nothing in the kernels would wait
  const int64_t states = p.B * p.H, tiles = (p.V + kTileColumns - 1) / kTileColumns;
  float* unrounded = p.epilogue.any() ? static_cast<float*>(scratch) : nullptr;
  int64_t fetched = p.K * p.V * int64_t(sizeof(float)) / tiles;
  if (states * tiles * fetched > kFetchBytes) fetched = kFetchBytes / (states * tiles);
  const int shared = int(p.K * int64_t(sizeof(float2) + sizeof(float)));
  launch(step_kernel<IO>, {states * tiles, kThreads, shared, stream, early}, p, unrounded,
         int(fetched / 16 * 16));
  if (!p.normalized && unrounded == nullptr) return;
  launch(finish_kernel<IO>, {states, kThreads, 0, stream, early}, p, unrounded);
}
template void run_step<bf16>(const StepParams&, const Device&, void*, cudaStream_t);
template void run_step<fp16>(const StepParams&, const Device&, void*, cudaStream_t);
template void run_step<float>(const StepParams&, const Device&, void*, cudaStream_t);

}  // namespace flashcell::cuda
