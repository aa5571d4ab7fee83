// The causal depthwise convolution before a cell, with an optional silu, and its gradient. A thread
// has neighbouring channels and a chunk of time. It reads each row of the chunk once, a group of
// steps ahead of its use, and reads the steps just before the chunk as well, so that no thread
// waits for another.
#include "../curve.cuh"
#include "../launch/linear.cuh"

namespace flashcell::cuda {

constexpr int kConvThreads = 128, kConvSteps = 64, kTaps = ConvParams::kTaps, kPast = kTaps - 1;

struct Cut {  // how a sequence is split: chunks of time, and blocks for the channels of a chunk
  int chunks, columns;
};

struct Chunk {  // a thread's part: channels from d on, steps [begin, end) of batch row b
  int64_t row, b, d, begin, end;  // row: index among the chunks of all sequences
  DEVICE Chunk(const ConvParams& p, const Cut& cut, int n)
      : row(blockIdx.x / cut.columns),
        b(row / cut.chunks),
        d((int64_t(blockIdx.x % cut.columns) * kConvThreads + threadIdx.x) * n),
        begin(row % cut.chunks * kConvSteps),
        end(begin + kConvSteps < p.T ? begin + kConvSteps : p.T) {}
};

// State of both directions: kN channels, their weights, and the inputs just before a step. A usual
// call has silu and no resets; the code for others asks for both in every step.
template <typename IO, int kN, bool kUsual>
struct Taps {
  using Words = Word<IO, kN>;

  const ConvParams& p;
  const IO* x_row;
  int64_t b, d;
  float weight[kTaps][kN], bias[kN];  // weight[j] applies to the step j before
  float past[kPast][kN];  // past[j] is the step j + 1 before, 0 if it is in another document

  DEVICE Taps(const ConvParams& params, const Chunk& chunk) : p(params), b(chunk.b), d(chunk.d) {
    x_row = static_cast<const IO*>(p.x) + b * p.x_batch + d;
    const float* rows = static_cast<const float*>(p.weight) + d;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int j = 0; j < kTaps; ++j) weight[j][n] = rows[(kPast - j) * p.D + n];
      bias[n] = rows[kTaps * p.D + n];
    }
    clear();
#pragma unroll
    for (int j = kPast; j > 0; --j) {
      const int64_t t = chunk.begin - j;
      Words words = load(x_row, p.x_time, t);
      if (t < 0 && p.window != nullptr) {
        const IO* row = static_cast<const IO*>(p.window) + (b * kPast + kPast + t) * p.D + d;
        words = *reinterpret_cast<const Words*>(row);
      }
      float x[kN];
      widen(words, x);
      if (t >= 0 && reset(t)) clear();
      shift(x);
    }
  }

  // Returns row t of a sequence, or 0 outside of it.
  DEVICE Words load(const IO* from, int64_t step, int64_t t) const {
    return 0 <= t && t < p.T ? *reinterpret_cast<const Words*>(from + t * step) : Words{};
  }
  DEVICE bool reset(int64_t t) const {
    return !kUsual && p.reset != nullptr && t < p.T && p.reset[b * p.T + t];
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
  DEVICE float sum(int n, float x) const {
    float u = fmaf(weight[0][n], x, bias[n]);
#pragma unroll
    for (int j = 0; j < kPast; ++j) u = fmaf(weight[j + 1][n], past[j][n], u);
    return u;
  }
};

template <typename IO, int kN, bool kUsual>
__global__ void __launch_bounds__(kConvThreads) conv_kernel(const
                                                            __grid_constant__ ConvForwardParams p,
                                                            const Cut cut) {
  using Words = Word<IO, kN>;
  constexpr int kAhead = 8;
  const Chunk chunk(p, cut, kN);
  if (chunk.d >= p.D) return;
  Taps<IO, kN, kUsual> taps(p, chunk);
  IO* y_row = static_cast<IO*>(p.y) + chunk.b * p.T * p.D + chunk.d;
  Words next[kAhead];
  auto request = [&](int64_t from) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) next[k] = taps.load(taps.x_row, p.x_time, from + k);
  };
  request(chunk.begin);
  for (int64_t from = chunk.begin; from < chunk.end; from += kAhead) {
    Words now[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) now[k] = next[k];
    if (from + kAhead < chunk.end) request(from + kAhead);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      float x[kN], y[kN];
      widen(now[k], x);
      if (taps.reset(from + k)) taps.clear();
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        y[n] = taps.sum(n, x[n]);
        if (kUsual || p.silu) y[n] *= sigmoid(Real<false>(y[n])).v;
      }
      taps.shift(x);
      if (from + k < chunk.end) {
        *reinterpret_cast<Words*>(y_row + (from + k) * p.D) = narrow<IO>(y);
      }
    }
  }
}

// dx_s = sum over j of weight[j] du_(s + j), where du is the gradient of the sum before the silu.
// It is written for the steps [begin, end) and, by the first chunk, for the window. Each chunk
// writes its share of the weight's gradient to partial [B, chunks, kTaps + 1, D].
template <typename IO, int kN>
__global__ void __launch_bounds__(kConvThreads) conv_backward_kernel(
    const __grid_constant__ ConvBackwardParams p, const Cut cut, float* partial) {
  using Words = Word<IO, kN>;
  constexpr int kAhead = 4;
  const Chunk chunk(p, cut, kN);
  if (chunk.d >= p.D) return;
  Taps<IO, kN, false> taps(p, chunk);
  const IO* dy_row = static_cast<const IO*>(p.dy) + chunk.b * p.T * p.D + chunk.d;
  IO* dx_row = static_cast<IO*>(p.dx) + chunk.b * p.T * p.D + chunk.d;
  IO* dwindow_row = static_cast<IO*>(p.dwindow) + chunk.b * kPast * p.D + chunk.d;
  float open[kPast][kN] = {};  // incomplete gradients of the steps t - 1, t - 2, ...
  float sums[kTaps + 1][kN] = {};
  int reach = kPast;  // number of earlier steps in the document of step t
  Words next_x[kAhead], next_dy[kAhead];
  auto request = [&](int64_t from) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      next_x[k] = taps.load(taps.x_row, p.x_time, from + k);
      next_dy[k] = taps.load(dy_row, p.D, from + k);
    }
  };
  request(chunk.begin);
  for (int64_t from = chunk.begin; from < chunk.end + kPast; from += kAhead) {
    Words now_x[kAhead], now_dy[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) now_x[k] = next_x[k], now_dy[k] = next_dy[k];
    if (from + kAhead < chunk.end + kPast) request(from + kAhead);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int64_t t = from + k, s = t - kPast;
      float x[kN], du[kN], dx[kN];
      widen(now_x[k], x), widen(now_dy[k], du);
      reach = min(reach + 1, kPast);
      if (taps.reset(t)) taps.clear(), reach = 0;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        if (p.silu) {
          const float u = taps.sum(n, x[n]), share = sigmoid(Real<false>(u)).v;
          du[n] *= share * fmaf(u, 1 - share, 1);
        }
        const float counted = t < chunk.end ? du[n] : 0;
        sums[kPast][n] = fmaf(counted, x[n], sums[kPast][n]);
#pragma unroll
        for (int j = 0; j < kPast; ++j) {
          sums[kPast - 1 - j][n] = fmaf(counted, taps.past[j][n], sums[kPast - 1 - j][n]);
        }
        sums[kTaps][n] += counted;
        auto back = [&](int j) { return j <= reach ? du[n] : 0; };
        dx[n] = fmaf(taps.weight[kPast][n], back(kPast), open[kPast - 1][n]);
#pragma unroll
        for (int j = kPast - 1; j > 0; --j) {
          open[j][n] = fmaf(taps.weight[j][n], back(j), open[j - 1][n]);
        }
        open[0][n] = taps.weight[0][n] * du[n];
      }
      taps.shift(x);
      if (chunk.begin <= s && s < chunk.end) {
        *reinterpret_cast<Words*>(dx_row + s * p.D) = narrow<IO>(dx);
      } else if (s < 0) {
        *reinterpret_cast<Words*>(dwindow_row + (kPast + s) * p.D) = narrow<IO>(dx);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < (kTaps + 1) * kN; ++i) {
    const int64_t row = chunk.row * (kTaps + 1) + i / kN;
    partial[row * p.D + chunk.d + i % kN] = sums[i / kN][i % kN];
  }
}

// Calls function(io, channels per thread, usual) with compile-time constants. Code for usual calls
// exists for several channels a thread only.
template <bool kHasUsual, typename Function>
static void for_conv(const ConvParams& p, const Launch& to, Function function) {
  auto with = [&](auto io, auto channels) {
    if constexpr (kHasUsual && decltype(channels)::value > 1) {
      if (p.silu && p.reset == nullptr) return function(io, channels, std::true_type());
    }
    function(io, channels, std::false_type());
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

static Cut cut_of(const ConvParams& p, int channels) {
  return {int(ceil_div(p.T, kConvSteps)), int(ceil_div(p.D, kConvThreads * channels))};
}
static int64_t rows_of(const ConvParams& p) { return p.B * cut_of(p, 1).chunks; }

void conv_forward(const ConvForwardParams& p, const Launch& to) {
  for_conv<true>(p, to, [&](auto io, auto channels, auto usual) {
    constexpr int kN = decltype(channels)::value;
    const Cut cut = cut_of(p, kN);
    launch(conv_kernel<decltype(io), kN, decltype(usual)::value>,
           {rows_of(p) * cut.columns, kConvThreads, 0, to.stream}, p, cut);
  });
}

int64_t conv_scratch(const ConvBackwardParams& p) {
  return rows_of(p) * (kTaps + 1) * p.D * int64_t(sizeof(float));
}

void conv_backward(const ConvBackwardParams& p, const Launch& to) {
  float* partial = static_cast<float*>(to.scratch);
  for_conv<false>(p, to, [&](auto io, auto channels, auto) {
    constexpr int kN = decltype(channels)::value;
    const Cut cut = cut_of(p, kN);
    launch(conv_backward_kernel<decltype(io), kN>,
           {rows_of(p) * cut.columns, kConvThreads, 0, to.stream}, p, cut, partial);
  });
  const int64_t width = (kTaps + 1) * p.D;
  launch(sum_kernel, {ceil_div(width, 32), 32 * kSumWarps, 0, to.stream},
         Partial{partial, rows_of(p)}, Partial{}, static_cast<const int*>(nullptr), width, width,
         static_cast<float*>(p.dweight));
}

}  // namespace flashcell::cuda
