// One step: C is read once and written once, all of it in flight before the first product.
//
// Two kernels, so that a state can be written where it stood: in the second every thread block
// needs what the first made of n and m. It starts while the first runs, and waits after its loads.
#include "early.cuh"
#include "epilogue.cuh"
#include "launch.h"
#include "step.h"

namespace flashcell::cuda {

extern __shared__ __align__(16) char memory[];

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kLanes = 16;  // for a row of C, four columns each
constexpr int kTileColumns = 4 * kLanes, kRowsAtOnce = kThreads / kLanes;
constexpr int kUnroll = 16;  // rows of a thread in flight
// Of C, what the first kernel brings into the L2 while what came before still runs, asked for by so
// many thread blocks: of more some is gone again before it is read.
constexpr int64_t kFetchBytes = 4 << 20, kFetchBlocks = 128;
constexpr float kShut = -1000, kNever = -1e30f;

struct alignas(16) Head {  // what the first kernel tells the second
  float keep, add, scale;
  int done;  // of the second's thread blocks
};

DEVICE float log_sigmoid(float x) { return fminf(x, 0.0f) - log1pf(expf(-fabsf(x))); }
DEVICE float at_least(float least, float x) { return x < least ? least : x; }  // NaN stays

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
template <typename X>
DEVICE void fetch_row([[maybe_unused]] const X* row, [[maybe_unused]] int count) {  // by a warp
#if __CUDA_ARCH__ >= 900
  constexpr int kLine = 128 / int(sizeof(X));
  for (int c = int(threadIdx.x) * kLine; c < count; c += 32 * kLine) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(row + c));
  }
#endif
}

// n, m and the factors of a head, by a warp. Of `parts` thread blocks of a head the others fetch
// `bytes` of C each, as the first does.
template <typename IO>
__global__ void __launch_bounds__(32) head_kernel(const StepParams p, Head* heads, int parts,
                                                  int bytes) {
  constexpr int kColumns = 8;  // of a lane at once
  const int state = int(blockIdx.x) / parts, part = int(blockIdx.x) % parts, lane = threadIdx.x;
  const int b = state / int(p.H), h = state % int(p.H), K = int(p.K);
  const int64_t first = int64_t(state) * K;
  const float *i = at<float>(p.i, b, h), *f = at<float>(p.f, b, h);
  const float* m = p.m ? static_cast<const float*>(p.m) + state : nullptr;
  const float* n = p.n ? static_cast<const float*>(p.n) + first : nullptr;
  const IO *k = at<IO>(p.k, b, h), *q = at<IO>(p.q, b, h);
  if (bytes > 0 && lane == 0) {
    const char* C = static_cast<const char*>(p.C) + first * p.V * int64_t(sizeof(float));
    fetch(C + int64_t(part) * bytes, bytes);
  }
  if (part == 0) {
    const int V = int(p.V);
    fetch_row(i, 1), fetch_row(f, 1);
    if (m != nullptr) fetch_row(m, 1);
    if (p.normalized) fetch_row(k, K), fetch_row(q, K);
    if (n != nullptr) fetch_row(n, K);
    if (p.epilogue.out_gate.data != nullptr) fetch_row(gate_row<IO>(p.epilogue, b, 0, h), V);
    if (p.epilogue.weight_is_io) {
      fetch_row(static_cast<const IO*>(p.epilogue.weight) + h * V, V);
    } else if (p.epilogue.weight != nullptr) {
      fetch_row(static_cast<const float*>(p.epilogue.weight) + h * V, V);
    }
  }
  wait_for_earlier();
  let_later_start();
  if (part != 0) return;
  float key[kColumns], query[kColumns], old[kColumns];
  const auto load = [&](int begin) {
#pragma unroll
    for (int u = 0; u < kColumns; ++u) {
      const int c = begin + lane + 32 * u;
      const bool exists = p.normalized && c < K;
      key[u] = exists ? to_float(k[c]) : 0.0f, query[u] = exists ? to_float(q[c]) : 0.0f;
      old[u] = exists && n != nullptr ? n[c] : 0.0f;
    }
  };
  load(0);
  const float input = *i, forget = *f, before = m != nullptr ? *m : 0.0f;
  const float log_f = at_least(kShut, log_sigmoid(forget));
  float after = 0, keep, add;
  if (p.exponential) {  // m is rounded, and the factors make up for it
    const float log_i = at_least(kNever, input);
    const double carried = double(log_f) + double(before);
    after = float(carried < double(log_i) ? double(log_i) : carried);
    keep = before < kNever ? 0.0f : expf(float(carried - double(after)));
    add = expf(float(double(log_i) - double(after)));
  } else {
    keep = expf(log_f), add = expf(log_sigmoid(input));
  }
  const float query_scale = rsqrtf(float(K));
  float scale = query_scale;
  if (p.normalized) {
    float sum = 0;
    for (int begin = 0; begin < K; begin += 32 * kColumns) {
      if (begin != 0) load(begin);
#pragma unroll
      for (int u = 0; u < kColumns; ++u) {
        const int c = begin + lane + 32 * u;
        const float value = (keep != 0 ? keep * old[u] : 0.0f) + add * key[u];
        if (c < K) static_cast<float*>(p.next_n)[first + c] = value;
        sum += value * query[u];
      }
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
    scale /= fmaxf(fabsf(sum * query_scale), expf(-after)) + float(p.eps);
  }
  if (lane != 0) return;
  if (p.next_m != nullptr) static_cast<float*>(p.next_m)[state] = after;
  heads[state] = {keep, add, scale, 0};
}

// By every thread: is this the last of a head's thread blocks? Then it sees what the others wrote.
DEVICE bool is_last_of(int blocks, int* done) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(done, 1) == blocks - 1;
  __syncthreads();
  if (is_last) __threadfence();
  return is_last;
}

template <typename IO>
DEVICE void finish_head(const Epilogue& p, const float* from, IO* to, int b, int h, int V) {
  Row<kThreads, 4, 1> row, weight, gate;
  static_assert(kThreads * 4 >= 1024);  // the widest
  row.load(from, V);
  weight.template load_weight<IO>(p, h, V);
  if (p.out_gate.data != nullptr) gate.load(gate_row<IO>(p, b, 0, h), V);
  finish_row<IO>(p, row, weight, gate, V);
  row.store(to, V);
}

// C and h of kTileColumns of a head. `unrounded` is h where an epilogue follows: that is done by
// the last of a head's thread blocks.
template <typename IO>
__global__ void __launch_bounds__(kThreads, 2) step_kernel(const StepParams p, Head* heads,
                                                           float* unrounded) {
  using Four = Row<kLanes, 4, 1>;
  float2* rows = reinterpret_cast<float2*>(memory);  // [K] key and query
  __shared__ float4 parts[kWarps][kLanes];
  const int K = int(p.K), V = int(p.V), tiles = (V + kTileColumns - 1) / kTileColumns;
  const int state = int(blockIdx.x) / tiles, tile = int(blockIdx.x) % tiles * kTileColumns;
  const int b = state / int(p.H), h = state % int(p.H);
  const int first = int(threadIdx.x) / kLanes, column = tile + Four::column(0);
  const bool inside = column < V;
  const float* C = static_cast<const float*>(p.C);
  if (C != nullptr) C += int64_t(state) * K * V + column;
  float* next = static_cast<float*>(p.next_C) + int64_t(state) * K * V + column;
  // A small state is in the L2 by now, and the next kernel may fetch its own; in a large one it
  // would take memory's time from this one's loads (B 8: 19.1 µs so, 18.5 late; B 1: 4.3, 4.6
  // late).
  const bool small = p.B * p.H * p.K * p.V * int64_t(sizeof(float)) <= kFetchBytes;
  if (small) let_later_start();
  Four value;
  value.load(at<IO>(p.v, b, h) + tile, V - tile);
  float4 old[kUnroll];
  const auto load = [&](int row) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int r = row + u * kRowsAtOnce;
      const bool exists = inside && r < K && C != nullptr;
      old[u] = exists ? __ldcs(reinterpret_cast<const float4*>(C + r * V)) : float4{};
    }
  };
  load(first);
  for (int r = threadIdx.x; r < K; r += kThreads) {
    rows[r] = {to_float(at<IO>(p.k, b, h)[r]), to_float(at<IO>(p.q, b, h)[r])};
  }
  __syncthreads();
  wait_for_earlier();
  if (!small) let_later_start();
  const Head head = heads[state];
#pragma unroll
  for (float& v : value.x) v *= head.add;
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
        x[e] = (head.keep == 0 ? 0.0f : head.keep * x[e]) + key_query.x * value.x[e];
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
  IO* out = static_cast<IO*>(p.h) + int64_t(state) * V;
  if (threadIdx.x < kLanes) {
    Four total{};
    for (int w = 0; w < kWarps; ++w) {
      const float4 part = parts[w][threadIdx.x];
      total.x[0] += part.x, total.x[1] += part.y, total.x[2] += part.z, total.x[3] += part.w;
    }
#pragma unroll
    for (float& x : total.x) x *= head.scale;
    if (unrounded == nullptr) {
      total.store(out + tile, V - tile);
    } else {
      total.store(unrounded + int64_t(state) * V + tile, V - tile);
      __threadfence();
    }
  }
  if (unrounded != nullptr && is_last_of(tiles, &heads[state].done)) {
    finish_head<IO>(p.epilogue, unrounded + int64_t(state) * V, out, b, h, V);
  }
}

Head* take_heads(const StepParams& p, Arrays& arrays, float** unrounded) {
  Head* heads = arrays.take<Head>(p.B * p.H);
  *unrounded = p.epilogue.any() ? arrays.take<float>(p.B * p.H * p.V) : nullptr;
  return heads;
}

}  // namespace

int64_t step_scratch(const StepParams& p) {
  Arrays arrays(nullptr);
  float* unrounded;
  take_heads(p, arrays, &unrounded);
  return arrays.bytes();
}

template <typename IO>
void run_step(const StepParams& p, const Device& device, void* scratch, cudaStream_t stream) {
  const bool early = device.arch >= 90;  // else nothing in the kernels would wait
  Arrays arrays(scratch);
  float* unrounded;
  Head* heads = take_heads(p, arrays, &unrounded);
  const int64_t states = p.B * p.H;
  int64_t parts = 1, bytes = 0;
  if (early && p.C != nullptr && states > 0) {
    while (states * parts < kFetchBlocks) parts *= 2;
    const int64_t share = kFetchBytes / (states * parts), C = p.K * p.V * int64_t(sizeof(float));
    bytes = (share < C / parts ? share : C / parts) / 16 * 16;
  }
  launch(head_kernel<IO>, {states * parts, 32, 0, stream, early}, p, heads, int(parts), int(bytes));
  const int64_t tiles = (p.V + kTileColumns - 1) / kTileColumns;
  const int shared = int(p.K * int64_t(sizeof(float2)));
  launch(step_kernel<IO>, {states * tiles, kThreads, shared, stream, early}, p, heads, unrounded);
}
template void run_step<bf16>(const StepParams&, const Device&, void*, cudaStream_t);
template void run_step<fp16>(const StepParams&, const Device&, void*, cudaStream_t);
template void run_step<float>(const StepParams&, const Device&, void*, cudaStream_t);

}  // namespace flashcell::cuda
