// One decoding step between the linear layers of a diagonal cell's published block: the
// convolution, and the cell with its skip connection and gate. With a few thousand channels this is
// so little work that the calling thread does it alone.
#pragma once
#include "channel_blocks.h"
#include "common/cpu/vec_math.h"

namespace flashcell::FLASHCELL_ISA {

template <typename V>
FN V silu(V x) {
  return x * sigmoid(x);
}

template <typename IO>
struct ConvStep {
  using T = State<IO>;
  using V = Vec<T>;
  static constexpr int kTaps = ConvParams::kTaps, kPast = kTaps - 1;

  static void run(const ConvStepParams& p, const Host&) {
    for (int64_t b = 0; b < p.B; ++b) {
      const IO* x = (const IO*)p.x + b * p.x_row;
      IO* const window = (IO*)p.window + b * kPast * p.D;
      for_vectors<T>(0, p.D, [&](int64_t d, int lanes, auto whole) __attribute__((always_inline)) {
        constexpr bool kWhole = decltype(whole)::value;
        V taps[kTaps], y = p.bias ? load_part<kWhole>((const IO*)p.bias + d, lanes) : V(0);
        read_taps<kWhole>((const IO*)p.weight + d * kTaps, lanes, taps);
        for (int j = 0; j < kTaps; ++j) {
          const IO* from = j < kPast ? window + j * p.D : x;
          y += taps[j] * load_part<kWhole>(from + d, lanes);
        }
        store_part<kWhole>((IO*)p.y + b * p.D + d, silu(y), lanes);
      });
      memmove((void*)window, window + p.D, (kPast - 1) * p.D * sizeof(IO));
      memcpy((void*)(window + (kPast - 1) * p.D), x, p.D * sizeof(IO));
    }
  }

  // The four taps of a channel are contiguous; taps[j] holds tap j of one vector of channels.
  template <bool Whole>
  static FN void read_taps(const IO* weight, int lanes, V (&taps)[kTaps]) {
    alignas(kVectorBytes) T rows[kTaps * V::kWidth], columns[V::kWidth];
    for (int v = 0; v < kTaps; ++v) {
      const int left = lanes * kTaps - v * V::kWidth;
      const int here = left < 0 ? 0 : left < V::kWidth ? left : V::kWidth;
      store(rows + v * V::kWidth, load_part<Whole>(weight + (here ? v * V::kWidth : 0), here));
    }
    for (int j = 0; j < kTaps; ++j) {
      for (int i = 0; i < V::kWidth; ++i) columns[i] = rows[i * kTaps + j];
      taps[j] = load(columns);
    }
  }
};

template <typename Cell, typename IO>
struct MixStep {
  using T = State<IO>;
  using V = Vec<T>;
  static constexpr int G = Cell::kGates, K = Cell::kStates, P = Cell::kWeights;
  static_assert(K <= MixStepParams::kMostStates);
  const MixStepParams& p;

  MixStep(const MixStepParams& params, const Host&) : p(params) {}

  void run() const {
    const int64_t heads = p.D > 0 ? p.D / p.J : 0;
    for (int64_t b = 0; b < p.B; ++b) {
      for (int64_t n = 0; n < heads; ++n) {
        const IO* u = (const IO*)p.u + (n * p.B + b) * G * p.J;
        for_vectors<T>(n * p.J, (n + 1) * p.J,
                       [&](int64_t d, int lanes, auto whole) __attribute__((always_inline)) {
                         vector<decltype(whole)::value>(u + d - n * p.J, b, d, lanes);
                       });
      }
    }
  }

  template <bool Whole>
  FN void vector(const IO* u, int64_t b, int64_t d, int lanes) const {
    auto read = [&](const void* from, int64_t at) __attribute__((always_inline)) {
      return load_part<Whole>((const IO*)from + at, lanes);
    };
    V x[G], w[P], now[K], next[K];
    for (int g = 0; g < G; ++g) {
      x[g] = read(u, g * p.J);
      if (p.bias) x[g] += read(p.bias, g * p.D + d);
    }
    const V bound{T(p.bound)};
    for (int q = 0; q < P; ++q) {
      w[q] = read(q < 3 ? p.a : p.p, (q < 3 ? q : q - 3) * p.D + d);
      w[q] = at_most(bound, at_least(-bound, w[q]));
    }
    const int64_t at = b * p.D + d;
    for (int k = 0; k < K; ++k) now[k] = load_part<Whole>((const T*)p.states[k] + at, lanes);
    Cell::forward(x, w, now, next);
    for (int k = 0; k < K; ++k) store_part<Whole>((T*)p.states[k] + at, next[k], lanes);
    const V y = next[0] + read(p.skip, d) * read(p.x, at);
    store_part<Whole>((IO*)p.y + at, y * silu(read(p.gate, b * p.gate_row + d)), lanes);
  }
};

}  // namespace flashcell::FLASHCELL_ISA
