// One decoding step between the linear layers of a diagonal cell's published block: the
// convolution, and the cell with its skip connection and gate. Both kernels are bound by memory
// latency, so a launch reads as little as possible and starts while the kernel before it is still
// finishing.
#include "../lane.cuh"
#include "../launch/linear.cuh"
#include "common/cuda/ptx/programmatic_launch.cuh"

namespace flashcell::cuda {

namespace {

constexpr int kStepThreads = 64, kPair = 2, kPast = ConvParams::kTaps - 1;

DEVICE float silu(float x) { return x * sigmoid(x); }

DEVICE float within(float x, float bound) {  // clamps x to [-bound, bound]; NaN stays NaN
  return x > bound ? bound : x < -bound ? -bound : x;
}

template <typename IO>
DEVICE void read(const void* from, int64_t at, float (&x)[kPair]) {
  widen(*reinterpret_cast<const Word<IO, kPair>*>(static_cast<const IO*>(from) + at), x);
}
template <typename IO>
DEVICE void write(void* to, int64_t at, const float (&x)[kPair]) {
  *reinterpret_cast<Word<IO, kPair>*>(static_cast<IO*>(to) + at) = narrow<IO>(x);
}

template <typename IO>
__global__ void __launch_bounds__(kStepThreads) conv_step_kernel(const ConvStepParams p) {
  const int64_t at = (int64_t(blockIdx.x) * kStepThreads + threadIdx.x) * kPair;
  const int64_t b = at / p.D, d = at % p.D;
  pdl_launch_dependents();
  pdl_wait();
  if (b >= p.B) return;
  float seen[kPast + 1][kPair], y[kPair] = {};
#pragma unroll
  for (int j = 0; j < kPast; ++j) read<IO>(p.window, (b * kPast + j) * p.D + d, seen[j]);
  read<IO>(p.x, b * p.x_row + d, seen[kPast]);
  if (p.bias != nullptr) read<IO>(p.bias, d, y);
#pragma unroll
  for (int n = 0; n < kPair; ++n) {
#pragma unroll
    for (int j = 0; j <= kPast; j += kPair) {
      float weight[kPair];
      read<IO>(p.weight, (d + n) * (kPast + 1) + j, weight);
      y[n] = fmaf(weight[0], seen[j][n], fmaf(weight[1], seen[j + 1][n], y[n]));
    }
    y[n] = silu(y[n]);
  }
  write<IO>(p.y, at, y);
#pragma unroll
  for (int j = 0; j < kPast; ++j) write<IO>(p.window, (b * kPast + j) * p.D + d, seen[j + 1]);
}

template <typename Cell, typename IO>
__global__ void __launch_bounds__(kStepThreads) mix_step_kernel(const MixStepParams p) {
  constexpr int G = Cell::kGates, K = Cell::kStates, P = Cell::kWeights;
  const int64_t at = (int64_t(blockIdx.x) * kStepThreads + threadIdx.x) * kPair;
  const int64_t b = at / p.D, d = at % p.D, n = d / p.J;
  pdl_launch_dependents();
  pdl_wait();
  if (b >= p.B) return;
  float u[G][kPair], w[P][kPair], s[K][kPair], x[kPair], skip[kPair], gate[kPair], y[kPair];
#pragma unroll
  for (int g = 0; g < G; ++g) {
    read<IO>(p.u, ((n * p.B + b) * G + g) * p.J + d % p.J, u[g]);
    float bias[kPair] = {};
    if (p.bias != nullptr) read<IO>(p.bias, g * p.D + d, bias);
    u[g][0] += bias[0], u[g][1] += bias[1];
  }
#pragma unroll
  for (int q = 0; q < P; ++q) {
    read<IO>(q < 3 ? p.a : p.p, (q < 3 ? q : q - 3) * p.D + d, w[q]);
  }
#pragma unroll
  for (int k = 0; k < K; ++k) read<float>(p.states[k], at, s[k]);
  read<IO>(p.x, at, x), read<IO>(p.skip, d, skip), read<IO>(p.gate, b * p.gate_row + d, gate);
#pragma unroll
  for (int i = 0; i < kPair; ++i) {
    float own_u[G], own_w[P], own[K], next[K];
#pragma unroll
    for (int g = 0; g < G; ++g) own_u[g] = u[g][i];
#pragma unroll
    for (int q = 0; q < P; ++q) own_w[q] = within(w[q][i], float(p.bound));
#pragma unroll
    for (int k = 0; k < K; ++k) own[k] = s[k][i];
    Cell::forward(own_u, own_w, own, next);
#pragma unroll
    for (int k = 0; k < K; ++k) s[k][i] = next[k];
    y[i] = fmaf(skip[i], x[i], next[0]) * silu(gate[i]);
  }
#pragma unroll
  for (int k = 0; k < K; ++k) write<float>(p.states[k], at, s[k]);
  write<IO>(p.y, at, y);
}

template <typename Function>
void for_io(Dtype dtype, Function function) {
  switch (dtype) {
    case Dtype::kFloat:
      return function(float());
    case Dtype::kBFloat16:
      return function(bf16());
    case Dtype::kHalf:
      return function(fp16());
    case Dtype::kDouble:
      break;
  }
  throw std::invalid_argument("diagonal_rnn: no CUDA engine for float64");
}

Grid grid_of(int64_t elements, const Launch& to) {
  return {ceil_div(elements, kStepThreads * kPair), kStepThreads, 0, to.stream,
          to.device.code.arch >= 90};
}

}  // namespace

void conv_step(const ConvStepParams& p, const Launch& to) {
  for_io(to.dtype,
         [&](auto io) { launch(conv_step_kernel<decltype(io)>, grid_of(p.B * p.D, to), p); });
}

template <typename Cell>
void mix_step(const MixStepParams& p, const Launch& to) {
  static_assert(Cell::kStates <= MixStepParams::kMostStates);
  for_io(to.dtype,
         [&](auto io) { launch(mix_step_kernel<Cell, decltype(io)>, grid_of(p.B * p.D, to), p); });
}
template void mix_step<FlashGru>(const MixStepParams&, const Launch&);
template void mix_step<FlashLstm>(const MixStepParams&, const Launch&);

}  // namespace flashcell::cuda
