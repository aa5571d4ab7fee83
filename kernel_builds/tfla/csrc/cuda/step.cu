// One step: C is read once and written once, all of it in flight before the first product.
//
// Two kernels, so that a state can be written where it stood: in the second every thread block
// needs what the first made of n and m. It starts while the first runs, and waits after its loads.
#include "launch.h"
#include "mma.cuh"
#include "step.h"

namespace flashcell::cuda {

extern __shared__ __align__(16) char memory[];

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kColumns = 32;                    // of C in a thread block: 128 bytes of a row
constexpr int kLanes = kColumns / 4;            // of a row
constexpr int kRowsAtOnce = kThreads / kLanes;  // 32
constexpr int kUnroll = 8;                      // rows of a thread in flight
constexpr float kShut = -1000, kNever = -1e30f;

struct Factors {  // of a head
  float keep, add, scale;
};

DEVICE float log_sigmoid(float x) { return fminf(x, 0.0f) - log1pf(expf(-fabsf(x))); }
DEVICE float at_least(float least, float x) { return x < least ? least : x; }  // NaN stays

template <typename X>
DEVICE const X* at(const Strided& x, int64_t b, int64_t h) {
  return static_cast<const X*>(x.data) + b * x.batch + h * x.head;
}

// What was launched before this kernel has ended; what is launched after it may start.
DEVICE void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void let_later_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <typename IO>
__global__ void __launch_bounds__(kThreads) factors_kernel(const StepParams p, Factors* factors) {
  wait_for_earlier();
  let_later_start();
  __shared__ float parts[kWarps];
  const int64_t state = blockIdx.x, b = state / p.H, h = state % p.H;
  const float i = *at<float>(p.i, b, h);
  const float log_f = at_least(kShut, log_sigmoid(*at<float>(p.f, b, h)));
  float m = 0, keep = expf(log_f), add;
  if (p.exponential) {  // m is rounded, and the factors make up for it
    const float before = p.m ? static_cast<const float*>(p.m)[state] : 0.0f,
                log_i = at_least(kNever, i);
    const double carried = double(log_f) + double(before);
    m = float(carried < double(log_i) ? double(log_i) : carried);
    keep = before < kNever ? 0.0f : expf(float(carried - double(m)));
    add = expf(float(double(log_i) - double(m)));
  } else {
    add = expf(log_sigmoid(i));
  }
  const float query_scale = rsqrtf(float(p.K));
  float scale = query_scale;
  if (p.normalized) {
    const IO *k = at<IO>(p.k, b, h), *q = at<IO>(p.q, b, h);
    const float* n = p.n ? static_cast<const float*>(p.n) + state * p.K : nullptr;
    float* next = static_cast<float*>(p.next_n) + state * p.K;
    float sum = 0;
    for (int c = threadIdx.x; c < p.K; c += kThreads) {
      const float old = n != nullptr ? n[c] : 0.0f;
      const float value = (keep != 0 ? keep * old : 0.0f) + add * to_float(k[c]);
      next[c] = value;
      sum += value * to_float(q[c]);
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += parts[w];
    scale /= fmaxf(fabsf(sum * query_scale), expf(-m)) + float(p.eps);
  }
  if (threadIdx.x != 0) return;
  if (p.next_m != nullptr) static_cast<float*>(p.next_m)[state] = m;
  factors[state] = {keep, add, scale};
}

template <typename IO>
__global__ void __launch_bounds__(kThreads, 4) step_kernel(const StepParams p,
                                                           const Factors* factors) {
  float2* rows = reinterpret_cast<float2*>(memory);  // [K] key and query
  __shared__ float4 parts[kWarps][kLanes];
  const int tiles = int(p.V + kColumns - 1) / kColumns, K = int(p.K), V = int(p.V);
  const int64_t state = blockIdx.x / tiles, b = state / p.H, h = state % p.H;
  const int lane = threadIdx.x % kLanes, first = threadIdx.x / kLanes;
  const int column = int(blockIdx.x) % tiles * kColumns + 4 * lane;
  const bool inside = column < V;
  const float* C = p.C ? static_cast<const float*>(p.C) + state * K * V + column : nullptr;
  float* next = static_cast<float*>(p.next_C) + state * K * V + column;
  let_later_start();
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
  float value[4] = {}, sum[4] = {};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (inside) value[e] = to_float(at<IO>(p.v, b, h)[column + e]);
  }
  for (int r = threadIdx.x; r < K; r += kThreads) {
    rows[r] = {to_float(at<IO>(p.k, b, h)[r]), to_float(at<IO>(p.q, b, h)[r])};
  }
  __syncthreads();
  wait_for_earlier();
  const Factors f = factors[state];
#pragma unroll
  for (float& v : value) v *= f.add;
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
        x[e] = (f.keep == 0 ? 0.0f : f.keep * x[e]) + key_query.x * value[e];
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
    parts[threadIdx.x / 32][lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  }
  __syncthreads();
  if (threadIdx.x >= kLanes || !inside) return;
  float4 total{};
  for (int w = 0; w < kWarps; ++w) {
    const float4 part = parts[w][lane];
    total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
  }
  IO* out = static_cast<IO*>(p.h) + state * V + column;
  const float sums[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
  for (int e = 0; e < 4; ++e) out[e] = from_float<IO>(sums[e] * f.scale);
}

}  // namespace

int64_t step_scratch(const StepParams& p) { return p.B * p.H * int64_t(sizeof(Factors)); }

template <typename IO>
void run_step(const StepParams& p, const Device& device, void* scratch, cudaStream_t stream) {
  const bool early = device.arch >= 90;  // else nothing in the kernels would wait
  Factors* factors = static_cast<Factors*>(scratch);
  const int64_t states = p.B * p.H;
  launch(factors_kernel<IO>, {states, kThreads, 0, stream, early}, p, factors);
  const int64_t tiles = (p.V + kColumns - 1) / kColumns;
  launch(step_kernel<IO>,
         {states * tiles, kThreads, int(p.K * int64_t(sizeof(float2))), stream, early}, p, factors);
}
template void run_step<bf16>(const StepParams&, const Device&, void*, cudaStream_t);
template void run_step<fp16>(const StepParams&, const Device&, void*, cudaStream_t);
template void run_step<float>(const StepParams&, const Device&, void*, cudaStream_t);

}  // namespace flashcell::cuda
