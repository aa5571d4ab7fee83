// The causal depthwise convolution ahead of a cell, with the silu that follows it. A thread has
// neighbouring channels and a chunk of time, whose rows it reads once; the steps before the chunk
// are read again. No thread waits for another.
#include "curve.cuh"
#include "launch_linear.cuh"

namespace flashcell::cuda {

constexpr int kConvThreads = 128, kConvSteps = 64;
constexpr int kConvAhead = 8;  // steps whose rows are asked for together

// What both directions hold: kN channels from d, their weights, and the taps before a step.
template <typename IO, int kN, int kTaps>
struct Taps {
  using Words = Word<IO, kN>;
  static constexpr int kPast = kTaps - 1;

  const ConvParams& p;
  int64_t b, d;
  float weight[kTaps][kN], bias[kN];  // weight[j] of the step j before
  float past[kPast][kN];              // past[j]: the step j + 1 before, 0 in another document

  DEVICE Taps(const ConvParams& params, int64_t row, int64_t channel)
      : p(params), b(row), d(channel) {
    const float* rows = static_cast<const float*>(p.weight) + d;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int j = 0; j < kTaps; ++j) weight[j][n] = rows[(kPast - j) * p.D + n];
      bias[n] = rows[kTaps * p.D + n];
    }
  }

  // x at step t >= 0, or 0 past the end.
  DEVICE Words load(int64_t t) const {
    const IO* from = static_cast<const IO*>(p.x) + b * p.x_batch + t * p.x_time + d;
    return t < p.T ? *reinterpret_cast<const Words*>(from) : Words{};
  }

  // The taps of step t; steps before the first are the window's, or 0.
  DEVICE void start(int64_t t) {
    clear();
#pragma unroll
    for (int j = kPast; j > 0; --j) {
      Words words = {};
      if (t >= j) {
        words = load(t - j);
      } else if (p.window != nullptr) {
        const IO* from = static_cast<const IO*>(p.window) + (b * kPast + kPast + t - j) * p.D + d;
        words = *reinterpret_cast<const Words*>(from);
      }
      float x[kN];
      widen(words, x);
      if (reset(t - j)) clear();
      shift(x);
    }
  }
  DEVICE bool reset(int64_t t) const {
    return p.reset != nullptr && t >= 0 && p.reset[b * p.T + t];
  }
  DEVICE void clear() {
#pragma unroll
    for (int j = 0; j < kPast * kN; ++j) past[j / kN][j % kN] = 0;
  }
  DEVICE void shift(const float (&x)[kN]) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int j = kPast - 1; j > 0; --j) past[j][n] = past[j - 1][n];
      past[0][n] = x[n];
    }
  }
  DEVICE float at(int n, float x) const {
    float sum = fmaf(weight[0][n], x, bias[n]);
#pragma unroll
    for (int j = 0; j < kPast; ++j) sum = fmaf(weight[j + 1][n], past[j][n], sum);
    return sum;
  }
};

struct Chunk {  // of a thread: channels from d, steps [begin, end) of row b
  int64_t b, d, begin, end;
  DEVICE Chunk(const ConvParams& p, int chunks, int n)
      : b(blockIdx.x / chunks),
        d((int64_t(blockIdx.y) * kConvThreads + threadIdx.x) * n),
        begin(int64_t(blockIdx.x % chunks) * kConvSteps),
        end(begin + kConvSteps < p.T ? begin + kConvSteps : p.T) {}
};

template <typename IO, int kN, int kTaps>
__global__ void __launch_bounds__(kConvThreads) conv_kernel(const
                                                            __grid_constant__ ConvForwardParams p,
                                                            int chunks) {
  const Chunk chunk(p, chunks, kN);
  if (chunk.d >= p.D) return;
  Taps<IO, kN, kTaps> taps(p, chunk.b, chunk.d);
  taps.start(chunk.begin);
  IO* y_row = static_cast<IO*>(p.y) + chunk.b * p.T * p.D + chunk.d;
  for (int64_t from = chunk.begin; from < chunk.end; from += kConvAhead) {
    Word<IO, kN> words[kConvAhead];
#pragma unroll
    for (int k = 0; k < kConvAhead; ++k) words[k] = taps.load(from + k);
#pragma unroll
    for (int k = 0; k < kConvAhead; ++k) {
      const int64_t t = from + k;
      if (t >= chunk.end) break;
      float x[kN], y[kN];
      widen(words[k], x);
      if (taps.reset(t)) taps.clear();
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        y[n] = taps.at(n, x[n]);
        if (p.silu) y[n] *= sigmoid(Real<false>(y[n])).v;
      }
      taps.shift(x);
      *reinterpret_cast<Word<IO, kN>*>(y_row + t * p.D) = narrow<IO>(y);
    }
  }
}

// dx_s = sum over j of weight[j] du_(s + j), where du is the gradient of the sum ahead of the silu,
// for the steps [begin, end) and, in the first chunk, for the window. The sums of a chunk for the
// weight go to partial [B, chunks, kTaps + 1, D].
template <typename IO, int kN, int kTaps>
__global__ void __launch_bounds__(kConvThreads) conv_backward_kernel(
    const __grid_constant__ ConvBackwardParams p, int chunks, float* partial) {
  using Words = Word<IO, kN>;
  constexpr int kPast = kTaps - 1;
  const Chunk chunk(p, chunks, kN);
  if (chunk.d >= p.D) return;
  Taps<IO, kN, kTaps> taps(p, chunk.b, chunk.d);
  taps.start(chunk.begin);
  const IO* dy_row = static_cast<const IO*>(p.dy) + chunk.b * p.T * p.D + chunk.d;
  IO* dx_row = static_cast<IO*>(p.dx) + chunk.b * p.T * p.D + chunk.d;
  IO* dwindow_row = static_cast<IO*>(p.dwindow) + chunk.b * kPast * p.D + chunk.d;
  float open[kPast][kN] = {};  // what has come for the steps t - 1, t - 2, ...
  float sums[kTaps + 1][kN] = {};
  for (int64_t from = chunk.begin; from < chunk.end + kPast; from += kConvAhead) {
    Words x_words[kConvAhead], dy_words[kConvAhead];
#pragma unroll
    for (int k = 0; k < kConvAhead; ++k) {
      const int64_t t = from + k;
      x_words[k] = dy_words[k] = Words{};
      if (t >= chunk.end + kPast) continue;
      x_words[k] = taps.load(t);
      if (t < p.T) dy_words[k] = *reinterpret_cast<const Words*>(dy_row + t * p.D);
    }
#pragma unroll
    for (int k = 0; k < kConvAhead; ++k) {
      const int64_t t = from + k, s = t - kPast;
      if (t >= chunk.end + kPast) break;
      float x[kN], du[kN], dx[kN];
      widen(x_words[k], x), widen(dy_words[k], du);
      const bool cut = t < p.T && taps.reset(t);
      if (cut) taps.clear();
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        if (p.silu) {
          const float u = taps.at(n, x[n]), share = sigmoid(Real<false>(u)).v;
          du[n] *= share * fmaf(u, 1 - share, 1);
        }
        const float counted = t < chunk.end ? du[n] : 0;
        sums[kPast][n] = fmaf(counted, x[n], sums[kPast][n]);
#pragma unroll
        for (int j = 0; j < kPast; ++j) {
          sums[kPast - 1 - j][n] = fmaf(counted, taps.past[j][n], sums[kPast - 1 - j][n]);
        }
        sums[kTaps][n] += counted;
        const float back = cut ? 0 : du[n];
        dx[n] = fmaf(taps.weight[kPast][n], back, open[kPast - 1][n]);
#pragma unroll
        for (int j = kPast - 1; j > 0; --j) {
          open[j][n] = fmaf(taps.weight[j][n], back, open[j - 1][n]);
        }
        open[0][n] = taps.weight[0][n] * du[n];
      }
      taps.shift(x);
      if (s >= chunk.begin) {
        *reinterpret_cast<Words*>(dx_row + s * p.D) = narrow<IO>(dx);
      } else if (s < 0) {
        *reinterpret_cast<Words*>(dwindow_row + (kPast + s) * p.D) = narrow<IO>(dx);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < (kTaps + 1) * kN; ++i) {
    const int64_t row = int64_t(blockIdx.x) * (kTaps + 1) + i / kN;
    partial[row * p.D + chunk.d + i % kN] = sums[i / kN][i % kN];
  }
}

// function(io, channels of a thread, taps)
template <typename Function>
static void for_conv(const ConvParams& p, const Launch& to, Function function) {
  auto with = [&](auto io, auto channels) {
    switch (p.taps) {
      case 2:
        return function(io, channels, std::integral_constant<int, 2>());
      case 3:
        return function(io, channels, std::integral_constant<int, 3>());
      case 4:
        return function(io, channels, std::integral_constant<int, 4>());
    }
    throw std::invalid_argument("diagonal_rnn: a convolution has 2 to 4 taps");
  };
  auto wide = [&](auto io) {
    constexpr int kWide = 8 / sizeof(io);
    if (to.together >= kWide) return with(io, std::integral_constant<int, kWide>());
    with(io, std::integral_constant<int, 1>());
  };
  switch (to.dtype) {
    case Dtype::kFloat:
      return wide(float());
    case Dtype::kBFloat16:
      return wide(bf16());
    case Dtype::kHalf:
      return wide(fp16());
    case Dtype::kDouble:
      break;
  }
  throw std::invalid_argument("diagonal_rnn: no CUDA engine for float64");
}

static int chunks_of(const ConvParams& p) { return int(ceil_div(p.T, kConvSteps)); }

void conv_forward(const ConvForwardParams& p, const Launch& to) {
  for_conv(p, to, [&](auto io, auto channels, auto taps) {
    constexpr int kN = decltype(channels)::value;
    const int64_t columns = ceil_div(p.D, kConvThreads * kN);
    launch(conv_kernel<decltype(io), kN, decltype(taps)::value>,
           {p.B * chunks_of(p), kConvThreads, 0, to.stream, false, columns}, p, chunks_of(p));
  });
}

int64_t conv_scratch(const ConvBackwardParams& p) {
  return p.B * chunks_of(p) * (p.taps + 1) * p.D * int64_t(sizeof(float));
}

void conv_backward(const ConvBackwardParams& p, const Launch& to) {
  float* partial = static_cast<float*>(to.scratch);
  for_conv(p, to, [&](auto io, auto channels, auto taps) {
    constexpr int kN = decltype(channels)::value;
    const int64_t columns = ceil_div(p.D, kConvThreads * kN);
    launch(conv_backward_kernel<decltype(io), kN, decltype(taps)::value>,
           {p.B * chunks_of(p), kConvThreads, 0, to.stream, false, columns}, p, chunks_of(p),
           partial);
  });
  const int64_t width = (p.taps + 1) * p.D;
  launch(sum_kernel, {ceil_div(width, 32), 32 * kSumWarps, 0, to.stream},
         Partial{partial, p.B * chunks_of(p)}, Partial{}, static_cast<const int*>(nullptr), width,
         width, static_cast<float*>(p.dweight));
}

}  // namespace flashcell::cuda
