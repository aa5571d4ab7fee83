// One step: C is read once and written once, all of it in flight before the first product.
//
// Two kernels, so that a state can be written where it stood: in the second every thread block
// needs what the first made of n and m. It starts while the first runs, and waits after its loads.
#include "launch.h"
#include "mma.cuh"
#include "run.h"

namespace flashcell::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kColumns = 32;                    // of C in a thread block: 128 bytes of a row
constexpr int kLanes = kColumns / 4;            // of a row
constexpr int kRowsAtOnce = kThreads / kLanes;  // 32
constexpr int kUnroll = 8;                      // rows of a thread in flight
constexpr double kShut = -1000, kNever = -1e30;

struct Factors {  // of a head
  float keep, add, scale;
};

DEVICE double log_sigmoid(double x) { return fmin(x, 0.0) - log1p(exp(-fabs(x))); }

template <typename X>
DEVICE const X* at(const Strided& x, int64_t b, int64_t h) {
  return static_cast<const X*>(x.data) + b * x.batch + h * x.head;
}

template <typename IO>
__global__ void __launch_bounds__(kThreads) factors_kernel(const StepParams p, Factors* factors) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  __shared__ float parts[kWarps];
  const int64_t state = blockIdx.x, b = state / p.H, h = state % p.H;
  const double i = *at<float>(p.i, b, h);
  const double log_f = fmax(log_sigmoid(*at<float>(p.f, b, h)), kShut);
  double m = 0, keep = exp(log_f), add = exp(log_sigmoid(i));
  if (p.exponential) {
    const double before = p.m ? double(static_cast<const float*>(p.m)[state]) : 0.0;
    const double log_i = fmax(i, kNever), carried = log_f + before;
    m = float(fmax(carried, log_i));
    keep = before < kNever ? 0.0 : exp(carried - m), add = exp(log_i - m);
  }
  const float query_scale = rsqrtf(float(p.K));
  float scale = query_scale;
  if (p.normalized) {
    const IO *k = at<IO>(p.k, b, h), *q = at<IO>(p.q, b, h);
    const float* n = p.n ? static_cast<const float*>(p.n) + state * p.K : nullptr;
    float* next = static_cast<float*>(p.next_n) + state * p.K;
    float sum = 0;
    for (int64_t c = threadIdx.x; c < p.K; c += kThreads) {
      const float carried = n != nullptr && keep != 0 ? float(keep) * n[c] : 0.0f;
      const float value = carried + float(add) * to_float(k[c]);
      next[c] = value;
      sum += value * to_float(q[c]);
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += parts[w];
    scale /= fmaxf(fabsf(sum * query_scale), float(exp(-m))) + float(p.eps);
  }
  if (threadIdx.x != 0) return;
  if (p.next_m != nullptr) static_cast<float*>(p.next_m)[state] = float(m);
  factors[state] = {float(keep), float(add), scale};
}

template <typename IO>
__global__ void __launch_bounds__(kThreads) step_kernel(const StepParams p,
                                                        const Factors* factors) {
  __shared__ float4 parts[kWarps][kLanes];
  const int64_t tiles = (p.V + kColumns - 1) / kColumns, state = blockIdx.x / tiles;
  const int64_t b = state / p.H, h = state % p.H;
  const int lane = threadIdx.x % kLanes, first = threadIdx.x / kLanes;
  const int64_t column = blockIdx.x % tiles * kColumns + 4 * lane;
  const bool inside = column < p.V;
  const float* C = p.C ? static_cast<const float*>(p.C) + state * p.K * p.V + column : nullptr;
  float* next = static_cast<float*>(p.next_C) + state * p.K * p.V + column;
  const IO *k = at<IO>(p.k, b, h), *q = at<IO>(p.q, b, h), *v = at<IO>(p.v, b, h) + column;
  float value[4] = {};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (inside) value[e] = to_float(v[e]);
  }
  float sum[4] = {};
  Factors f{};
  for (int64_t row = first; row < p.K; row += kUnroll * kRowsAtOnce) {
    float4 old[kUnroll];
    float key[kUnroll], query[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t r = row + u * kRowsAtOnce;
      const bool exists = inside && r < p.K;
      old[u] = exists && C != nullptr ? reinterpret_cast<const float4&>(C[r * p.V]) : float4{};
      key[u] = exists ? to_float(k[r]) : 0.0f, query[u] = exists ? to_float(q[r]) : 0.0f;
    }
    if (row == first) {
#if __CUDA_ARCH__ >= 900
      asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
      f = factors[state];
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t r = row + u * kRowsAtOnce;
      float x[4] = {old[u].x, old[u].y, old[u].z, old[u].w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] = (f.keep == 0 ? 0.0f : f.keep * x[e]) + f.add * key[u] * value[e];
        sum[e] += query[u] * x[e];
      }
      if (inside && r < p.K) {
        reinterpret_cast<float4&>(next[r * p.V]) = make_float4(x[0], x[1], x[2], x[3]);
      }
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
  IO* out = static_cast<IO*>(p.h) + state * p.V + column;
  const float sums[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
  for (int e = 0; e < 4; ++e) out[e] = from_float<IO>(sums[e] * f.scale);
}

}  // namespace

int64_t step_scratch(const StepParams& p) { return p.B * p.H * int64_t(sizeof(Factors)); }

template <typename IO>
void run_step(const StepParams& p, void* scratch, cudaStream_t stream) {
  Factors* factors = static_cast<Factors*>(scratch);
  const int64_t states = p.B * p.H;
  launch(factors_kernel<IO>, {states, kThreads, 0, stream}, p, factors);
  launch(step_kernel<IO>, {states * ((p.V + kColumns - 1) / kColumns), kThreads, 0, stream, true},
         p, factors);
}
template void run_step<bf16>(const StepParams&, void*, cudaStream_t);
template void run_step<fp16>(const StepParams&, void*, cudaStream_t);
template void run_step<float>(const StepParams&, void*, cudaStream_t);

}  // namespace flashcell::cuda
