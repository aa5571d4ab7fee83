// Between the linear layers of a decoded batch: the norm of every row together with the gates that
// read it, and the SwiGLU gate. Each is one kernel, bound by launch latency.
#include "../launch.h"
#include "common/cuda/ptx/mma.cuh"
#include "common/cuda/ptx/programmatic_launch.cuh"
#include "linear.h"

namespace flashcell::cuda {

extern __shared__ __align__(16) char memory[];

namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kVector = 8;  // elements in 16 bytes

template <typename IO>
struct Eight {
  uint4 words;

  DEVICE static Eight load(const IO* from) { return {*reinterpret_cast<const uint4*>(from)}; }
  DEVICE void store(IO* to) const { *reinterpret_cast<uint4*>(to) = words; }
  DEVICE void unpack(float (&x)[kVector]) const {
    const uint32_t own[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = Pair<IO>{{own[i]}}.floats();
      x[2 * i] = two.x, x[2 * i + 1] = two.y;
    }
  }
  DEVICE static Eight pack(const float (&x)[kVector]) {
    uint32_t own[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) own[i] = Pair<IO>::of(x[2 * i], x[2 * i + 1]).word[0];
    return {{own[0], own[1], own[2], own[3]}};
  }
};

DEVICE float warp_sum(float sum) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
  return sum;
}

// A thread block has one row of x. Its normed values stay in shared memory for the gates, which the
// warps compute one each.
template <typename IO>
__global__ void __launch_bounds__(kThreads) norm_step_kernel(const
                                                             __grid_constant__ NormStepParams p) {
  IO* normed = reinterpret_cast<IO*>(memory);
  __shared__ float squares[kWarps];
  const int K = int(p.K), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t b = blockIdx.x;
  const IO* x = static_cast<const IO*>(p.x) + b * p.x_stride;
  IO* out = static_cast<IO*>(p.out) + b * p.K;
  pdl_wait();
  pdl_launch_dependents();
  float sum = 0, row[kVector], scale[kVector];
  for (int k = threadIdx.x * kVector; k < K; k += kThreads * kVector) {
    Eight<IO>::load(x + k).unpack(row);
#pragma unroll
    for (float value : row) sum = fmaf(value, value, sum);
  }
  sum = warp_sum(sum);
  if (lane == 0) squares[warp] = sum;
  __syncthreads();
  sum = 0;
  for (int other = 0; other < kWarps; ++other) sum += squares[other];
  const float factor = rsqrtf(sum / float(K) + float(p.eps));
  for (int k = threadIdx.x * kVector; k < K; k += kThreads * kVector) {
    Eight<IO>::load(x + k).unpack(row);
    Eight<IO>::load(static_cast<const IO*>(p.norm) + k).unpack(scale);
#pragma unroll
    for (int i = 0; i < kVector; ++i) row[i] *= factor * scale[i];
    const Eight<IO> rounded = Eight<IO>::pack(row);
    rounded.store(out + k), rounded.store(normed + k);
  }
  __syncthreads();

  int gate = warp;  // counts through the rows of all matrices
  for (int s = 0; s < p.count; ++s) {
    const Linear& linear = p.linears[s];
    for (; gate < linear.rows; gate += kWarps) {
      const IO* weight = static_cast<const IO*>(linear.weight) + gate * p.K;
      sum = 0;
      for (int k = lane * kVector; k < K; k += 32 * kVector) {
        Eight<IO>::load(normed + k).unpack(row);
        Eight<IO>::load(weight + k).unpack(scale);
#pragma unroll
        for (int i = 0; i < kVector; ++i) sum = fmaf(row[i], scale[i], sum);
      }
      sum = warp_sum(sum);
      if (lane != 0) continue;
      if (linear.bias != nullptr) sum += to_float(static_cast<const IO*>(linear.bias)[gate]);
      const float cap = float(p.cap);
      static_cast<float*>(linear.out)[b * linear.out_stride + gate] =
          cap > 0 ? cap * tanhf(sum / cap) : sum;
    }
    gate -= int(linear.rows);
  }
}

template <typename IO>
__global__ void __launch_bounds__(kThreads) gate_step_kernel(const GateStepParams p) {
  const int64_t vectors = p.N / kVector;
  const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  pdl_wait();
  pdl_launch_dependents();
  if (at >= p.B * vectors) return;
  const int64_t b = at / vectors, column = at % vectors * kVector;
  float gate[kVector], up[kVector];
  Eight<IO>::load(static_cast<const IO*>(p.gate) + b * p.gate_stride + column).unpack(gate);
  Eight<IO>::load(static_cast<const IO*>(p.up) + b * p.up_stride + column).unpack(up);
#pragma unroll
  for (int i = 0; i < kVector; ++i) gate[i] = gate[i] / (1 + expf(-gate[i])) * up[i];
  Eight<IO>::pack(gate).store(static_cast<IO*>(p.out) + b * p.N + column);
}

}  // namespace

template <typename IO>
void run_norm_step(const NormStepParams& p, const Device& device, cudaStream_t stream) {
  const int64_t widest = (device.shared_bytes - kWarps * sizeof(float)) / sizeof(IO);
  if (p.K > widest) {
    throw std::invalid_argument("tfla: x has rows of " + std::to_string(p.K) +
                                ", but norm_step takes at most " + std::to_string(widest) +
                                " on this GPU");
  }
  const int bytes = int(p.K * int64_t(sizeof(IO)));
  launch(norm_step_kernel<IO>, {p.B, kThreads, bytes, stream, device.code.arch >= 90}, p);
}
template <typename IO>
void run_gate_step(const GateStepParams& p, const Device& device, cudaStream_t stream) {
  const int64_t blocks = (p.B * (p.N / kVector) + kThreads - 1) / kThreads;
  launch(gate_step_kernel<IO>, {blocks, kThreads, 0, stream, device.code.arch >= 90}, p);
}
template void run_norm_step<bf16>(const NormStepParams&, const Device&, cudaStream_t);
template void run_norm_step<fp16>(const NormStepParams&, const Device&, cudaStream_t);
template void run_gate_step<bf16>(const GateStepParams&, const Device&, cudaStream_t);
template void run_gate_step<fp16>(const GateStepParams&, const Device&, cudaStream_t);

}  // namespace flashcell::cuda
