// One step: C is read once and written once, all of a thread block's part in flight at once.
//
// Every thread block reads n and m for itself, and a state can be written where it stood: so nobody
// may write them until all have read them. A second kernel does, which is launched then, while C is
// on its way; it also ends h, if there is an epilogue. Where all thread blocks run at once and
// there is none, those of a head are a cluster instead, whose first one writes.
#include "early.cuh"
#include "epilogue.cuh"
#include "launch.h"
#include "step.h"

namespace flashcell::cuda {

extern __shared__ __align__(16) char memory[];

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kMostCluster = 8;
// Of a thread in step_kernel: two of its thread blocks leave room on an SM for one of
// finish_kernel.
constexpr int kRegisters = 112;
constexpr int kLanes = 16;  // for a row of C, four columns each
constexpr int kTileColumns = 4 * kLanes, kRowsAtOnce = kThreads / kLanes;
constexpr int kUnroll = 16;  // rows of a thread in flight
// Of C, what is brought into the L2 while what came before still runs: of more some is gone again
// before it is read. A thread block for every SM fetches its part.
constexpr int64_t kFetchBytes = 6 << 20;
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
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}
// By one warp: of a row, up to 4 KB.
DEVICE void fetch_row([[maybe_unused]] const void* row, [[maybe_unused]] int bytes) {
#if __CUDA_ARCH__ >= 900
  const int at = int(threadIdx.x) % 32 * 128;
  if (at >= bytes) return;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(row) + at));
#endif
}

// All thread blocks of a cluster have come so far: in two halves, with work between them. They
// order no memory (a release would wait for C): what was read before the first has been stored.
DEVICE void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
DEVICE void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
}

// The compiler learns that there are kThreads.
DEVICE int thread() { return int(threadIdx.x % kThreads); }

struct Factors {
  float keep, add, m;  // of the state, of k v, and the state's scale from now on
};
DEVICE Factors find_factors(const StepParams& p, float input, float forget, float before) {
  const float log_f = at_least(kShut, log_sigmoid(forget));
  if (!p.exponential) return {expf(log_f), expf(log_sigmoid(input)), 0};
  const float log_i = at_least(kNever, input);  // m is rounded, and the factors make up for it
  const double carried = double(log_f) + double(before);
  const float m = float(carried < double(log_i) ? double(log_i) : carried);
  const float keep = before < kNever ? 0.0f : expf(float(carried - double(m)));
  return {keep, expf(float(double(log_i) - double(m))), m};
}

struct KeyRow {  // of a head
  float key, query, n;
};

// What a head's step reads, but for C and v.
template <typename IO>
struct Head {
  int state, b, h, K;
  const IO *k, *q;
  const float *i, *f, *m, *n;  // m and n null for 0

  DEVICE Head(const StepParams& p, int number, int K)
      : state(number), b(number / int(p.H)), h(number % int(p.H)), K(K) {
    k = at<IO>(p.k, b, h), q = at<IO>(p.q, b, h);
    i = at<float>(p.i, b, h), f = at<float>(p.f, b, h);
    m = p.m ? static_cast<const float*>(p.m) + state : nullptr;
    n = p.n ? static_cast<const float*>(p.n) + int64_t(state) * K : nullptr;
  }
  DEVICE void fetch() const {
    const int warp = threadIdx.x / 32, io = int(sizeof(IO)), own = int(sizeof(float));
    if (warp == 1) fetch_row(k, K * io);
    if (warp == 2) fetch_row(q, K * io);
    if (warp == 3 && n != nullptr) fetch_row(n, K * own);
    if (warp == 4) fetch_row(i, own), fetch_row(f, own);
    if (warp == 5 && m != nullptr) fetch_row(m, own);
  }
  DEVICE float m_before() const { return m != nullptr ? *m : 0.0f; }
  DEVICE KeyRow row(int r) const {
    if (r >= K) return {};
    return {to_float(k[r]), to_float(q[r]), n != nullptr ? n[r] : 0.0f};
  }
  // Where nobody reads the old ones any more; `own` is the thread's first row.
  DEVICE void write_n_and_m(const StepParams& p, const Factors& factors, const KeyRow& own) const {
    float* next_n = static_cast<float*>(p.next_n) + int64_t(state) * K;
    const auto write = [&](int r, const KeyRow& old) {
      if (r < K) next_n[r] = times(factors.keep, old.n) + factors.add * old.key;
    };
    write(thread(), own);
#pragma unroll 1  // few heads are so wide
    for (int r = thread() + kThreads; r < K; r += kThreads) write(r, row(r));
    if (thread() == 0 && p.next_m != nullptr) static_cast<float*>(p.next_m)[state] = factors.m;
  }
};

// C of kTileColumns of a head, and their h: in `unrounded` where an epilogue follows. The first
// `fetching` thread blocks, which run at once, fetch `bytes` of C each. kKey and kValue are K and
// V, or 0 for any.
template <typename IO, bool kCluster, int kKey, int kValue>
__global__ void __maxnreg__(kRegisters) step_kernel(const StepParams p, float* unrounded,
                                                    int fetching, int bytes) {
  using Four = Row<kLanes, 4, 1>;
  float2* rows = reinterpret_cast<float2*>(memory);  // [K] key and query
  __shared__ float4 parts[kWarps][kLanes];
  __shared__ float4 read[kWarps];  // n q and k q of a warp's rows, and m
  const int K = kKey > 0 ? kKey : int(p.K), V = kValue > 0 ? kValue : int(p.V);
  const int tiles = (V + kTileColumns - 1) / kTileColumns;
  const int part = int(blockIdx.x) % tiles, tile = part * kTileColumns;
  const Head<IO> head(p, int(blockIdx.x) / tiles, K);
  const int first = thread() / kLanes, column = tile + Four::column(0);
  const int64_t all = int64_t(head.state) * K * V, own_part = all + int64_t(first) * V + column;
  const float* C = static_cast<const float*>(p.C);
  float* next = static_cast<float*>(p.next_C) + own_part;
  const bool inside = kValue > 0 || column < V, has_old = inside && C != nullptr;
  static_assert(kValue % kTileColumns == 0);
  if (int(blockIdx.x) < fetching && thread() == 0) {
    fetch(reinterpret_cast<const char*>(C + all) + part * bytes, bytes);
  }
  head.fetch();
  wait_for_earlier();
  if (kCluster) let_later_start();

  const float input = *head.i, forget = *head.f, before = head.m_before();
  const KeyRow own = head.row(thread());
  Four value;
  value.load(at<IO>(p.v, head.b, head.h) + tile, V - tile);
  float4 old[kUnroll];
  const auto load = [&](int row) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int r = row + u * kRowsAtOnce;
      const float* from = C + own_part + int64_t(r) * V;
      old[u] = has_old && first + r < K ? __ldcs(reinterpret_cast<const float4*>(from)) : float4{};
    }
  };
  __syncwarp();  // or the compiler asks for a gate after C, and the factors come last of all
  load(0);
  float n_q = own.n * own.query, k_q = own.key * own.query;
  if (thread() < K) rows[thread()] = {own.key, own.query};
#pragma unroll 1  // few heads are so wide
  for (int r = thread() + kThreads; r < K; r += kThreads) {
    const KeyRow more = head.row(r);
    n_q += more.n * more.query, k_q += more.key * more.query, rows[r] = {more.key, more.query};
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    n_q += __shfl_xor_sync(~0u, n_q, mask), k_q += __shfl_xor_sync(~0u, k_q, mask);
  }
  // Stored, so that what was asked for has come: a warp reads m in one instruction.
  if (threadIdx.x % 32 == 0) read[threadIdx.x / 32] = make_float4(n_q, k_q, before, 0);
  __syncthreads();
  if (kCluster) {
    cluster_arrive();
  } else {
    let_later_start();
  }

  const Factors factors = find_factors(p, input, forget, before);
#pragma unroll
  for (float& x : value.x) x *= factors.add;
  float sum[4] = {};
  for (int row = 0; row < K; row += kUnroll * kRowsAtOnce) {
    if (row > 0) load(row);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int r = row + u * kRowsAtOnce;
      if (!inside || first + r >= K) continue;
      const float2 key_query = rows[first + r];
      float x[4] = {old[u].x, old[u].y, old[u].z, old[u].w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] = times(factors.keep, x[e]) + key_query.x * value.x[e];
        sum[e] += key_query.y * x[e];
      }
      float* to = next + int64_t(r) * V;
      __stcs(reinterpret_cast<float4*>(to), make_float4(x[0], x[1], x[2], x[3]));
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
  if (kCluster) {
    cluster_wait();
    if (part == 0) head.write_n_and_m(p, factors, own);
  }
  __syncthreads();
  if (threadIdx.x >= kLanes) return;
  Four total{};
  n_q = k_q = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float4 more = parts[w][threadIdx.x];
    total.x[0] += more.x, total.x[1] += more.y, total.x[2] += more.z, total.x[3] += more.w;
    n_q += read[w].x, k_q += read[w].y;
  }
  const float query_scale = rsqrtf(float(K));
  float scale = query_scale;
  if (p.normalized) {
    const float total_q = times(factors.keep, n_q) + factors.add * k_q;  // of the new n
    scale /= fmaxf(fabsf(total_q * query_scale), expf(-factors.m)) + float(p.eps);
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
  const Head<IO> head(p, int(blockIdx.x), int(p.K));
  let_later_start();
  if (p.normalized) {
    const KeyRow own = head.row(thread());
    const Factors factors = find_factors(p, *head.i, *head.f, head.m_before());
    __syncthreads();  // all have read m
    head.write_n_and_m(p, factors, own);
  }
  wait_for_earlier();  // what comes later waits for this kernel alone
  if (unrounded == nullptr) return;
  Row<kThreads, 4, 1> row, weight, gate;
  static_assert(decltype(row)::kSize * kThreads >= 1024);  // the widest
  const int V = int(p.V);
  row.load(unrounded + int64_t(head.state) * V, V);
  weight.template load_weight<IO>(p.epilogue, head.h, V);
  if (p.epilogue.out_gate.data != nullptr) {
    gate.load(gate_row<IO>(p.epilogue, head.b, 0, head.h), V);
  }
  finish_row<IO>(p.epilogue, row, weight, gate, V);
  row.store(static_cast<IO*>(p.h) + int64_t(head.state) * V, V);
}

// With widths known to the compiler the addresses of C are constants apart, and its loads follow
// each other at once: those of models get a kernel of their own.
template <typename IO, bool kCluster>
auto step_kernel_for(int64_t K, int64_t V) {
  if (K == 256 && V == 512) return step_kernel<IO, kCluster, 256, 512>;
  if (K == 128 && V == 256) return step_kernel<IO, kCluster, 128, 256>;
  return step_kernel<IO, kCluster, 0, 0>;
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
  const int64_t blocks = states * tiles;
  int64_t fetching = 0, bytes = 0;
  if (p.C != nullptr && blocks > 0) {
    fetching = blocks < device.processors ? blocks : device.processors;
    bytes = p.K * p.V * int64_t(sizeof(float)) / tiles;
    if (bytes > kFetchBytes / fetching) bytes = kFetchBytes / fetching;
  }
  const bool cluster = device.clusters && p.normalized && unrounded == nullptr &&
                       tiles <= kMostCluster && blocks <= device.processors;
  const int shared = int(p.K * int64_t(sizeof(float2)));
  Grid grid{blocks, kThreads, shared, stream, early};
  if (cluster) grid.cluster = int(tiles);
  const auto kernel =
      cluster ? step_kernel_for<IO, true>(p.K, p.V) : step_kernel_for<IO, false>(p.K, p.V);
  launch(kernel, grid, p, unrounded, int(fetching), int(bytes / 16 * 16));
  if (cluster || (!p.normalized && unrounded == nullptr)) return;
  launch(finish_kernel<IO>, {states, kThreads, 0, stream, early}, p, unrounded);
}
template void run_step<bf16>(const StepParams&, const Device&, void*, cudaStream_t);
template void run_step<fp16>(const StepParams&, const Device&, void*, cudaStream_t);
template void run_step<float>(const StepParams&, const Device&, void*, cudaStream_t);

}  // namespace flashcell::cuda
