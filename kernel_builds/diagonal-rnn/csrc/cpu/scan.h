// h_t = a_t h_{t-1} + b_t for n x n blocks; n = 1 is the elementwise scan. Rows of a few channels
// are widened to the state dtype, over which the compiler vectorises. The split into channels
// depends on n only, so results do not depend on the number of threads.
#pragma once
#include "channel_blocks.h"

namespace flashcell::FLASHCELL_ISA {

template <typename IO>
FN void widen(const IO* from, State<IO>* to, int64_t count) {
  for_vectors<State<IO>>(0, count,
                         [&](int64_t i, int lanes, auto whole) __attribute__((always_inline)) {
                           constexpr bool kWhole = decltype(whole)::value;
                           store_part<kWhole>(to + i, load_part<kWhole>(from + i, lanes), lanes);
                         });
}

template <typename IO>
FN void narrow(const State<IO>* from, IO* to, int64_t count) {
  for_vectors<State<IO>>(0, count,
                         [&](int64_t i, int lanes, auto whole) __attribute__((always_inline)) {
                           constexpr bool kWhole = decltype(whole)::value;
                           store_part<kWhole>(to + i, load_part<kWhole>(from + i, lanes), lanes);
                         });
}

template <typename IO>
struct Scan {
  using T = State<IO>;
  static constexpr int64_t kElements = 512;  // elements of `a` in a row at once: 2 KB

  template <template <typename, int> class Pass, typename Params>
  static void run(const Params& params, const Host& host) {
    switch (params.n) {
      case 1:
        return blocks<Pass<IO, 1>, 1>(params, host);
      case 2:
        return blocks<Pass<IO, 2>, 2>(params, host);
      case 3:
        return blocks<Pass<IO, 3>, 3>(params, host);
      default:
        return blocks<Pass<IO, 4>, 4>(params, host);
    }
  }

  template <typename Pass, int n, typename Params>
  static void blocks(const Params& p, const Host& host) {
    constexpr int64_t kChannels = kElements / (n * n);
    const int64_t blocks = (p.D + kChannels - 1) / kChannels;
    auto block = [&](int64_t task) {
      const int64_t c = task % blocks * kChannels;
      Pass{p}.block(task / blocks, c, c + kChannels < p.D ? kChannels : p.D - c);
    };
    if (p.B * p.T * p.D * n * n < 4 * kFewSteps) {
      for (int64_t task = 0; task < p.B * blocks; ++task) block(task);
    } else {
      parallel_for(host, p.B * blocks, block);
    }
  }
};

template <typename IO, int n>
struct ScanForwardPass {
  using T = State<IO>;
  const ScanForwardParams& p;

  void block(int64_t batch, int64_t channel, int64_t count) const {
    T a[Scan<IO>::kElements], b[Scan<IO>::kElements], h[Scan<IO>::kElements];
    const T* h0 = (const T*)p.h0 + (batch * p.D + channel) * n;
    if (p.h0 != nullptr)
      memcpy(h, h0, count * n * sizeof(T));
    else
      memset(h, 0, count * n * sizeof(T));
    for (int64_t i = 0; i < p.T; ++i) {
      const int64_t t = p.reverse ? p.T - 1 - i : i;
      const int64_t at = ((batch * p.T + t) * p.D + channel) * n;
      widen((const IO*)p.a + at * n, a, count * n * n);
      widen((const IO*)p.b + at, b, count * n);
      for (int64_t c = 0; c < count; ++c) {
        T next[n];
        for (int j = 0; j < n; ++j) {
          next[j] = b[c * n + j];
          for (int k = 0; k < n; ++k) next[j] += a[(c * n + j) * n + k] * h[c * n + k];
        }
        for (int j = 0; j < n; ++j) h[c * n + j] = next[j];
      }
      narrow(h, (IO*)p.h + at, count * n);
    }
  }
};

// g_t = dh_t + a_{t+1}^T g_{t+1}:  db = g,  da_t = g_t h_{t-1}^T,  dh0 = a_0^T g_0
template <typename IO, int n>
struct ScanBackwardPass {
  using T = State<IO>;
  const ScanBackwardParams& p;

  void block(int64_t batch, int64_t channel, int64_t count) const {
    T a[Scan<IO>::kElements], g[Scan<IO>::kElements], dh[Scan<IO>::kElements];
    T h[Scan<IO>::kElements];
    memset(dh, 0, count * n * sizeof(T));  // holds a^T g of the step after
    for (int64_t i = p.T - 1; i >= 0; --i) {
      const int64_t t = p.reverse ? p.T - 1 - i : i, before = p.reverse ? t + 1 : t - 1;
      const int64_t at = ((batch * p.T + t) * p.D + channel) * n;
      widen((const IO*)p.dh + at, g, count * n);
      widen((const IO*)p.a + at * n, a, count * n * n);
      if (i > 0)
        widen((const IO*)p.h + at + (before - t) * p.D * n, h, count * n);
      else if (p.h0)
        memcpy(h, (const T*)p.h0 + (batch * p.D + channel) * n, count * n * sizeof(T));
      else
        memset(h, 0, count * n * sizeof(T));
      for (int64_t c = 0; c < count * n; ++c) g[c] += dh[c];
      for (int64_t c = 0; c < count; ++c) {
        for (int k = 0; k < n; ++k) {
          T sum = 0;
          for (int j = 0; j < n; ++j) sum += a[(c * n + j) * n + k] * g[c * n + j];
          dh[c * n + k] = sum;
        }
        for (int j = 0; j < n; ++j) {  // a is read before da is written in its place
          for (int k = 0; k < n; ++k) a[(c * n + j) * n + k] = g[c * n + j] * h[c * n + k];
        }
      }
      narrow(a, (IO*)p.da + at * n, count * n * n);
      narrow(g, (IO*)p.db + at, count * n);
    }
    memcpy((T*)p.dh0 + (batch * p.D + channel) * n, dh, count * n * sizeof(T));
  }
};

template <typename IO>
struct ScanForward {
  static void run(const ScanForwardParams& params, const Host& host) {
    Scan<IO>::template run<ScanForwardPass>(params, host);
  }
};
template <typename IO>
struct ScanBackward {
  static void run(const ScanBackwardParams& params, const Host& host) {
    Scan<IO>::template run<ScanBackwardPass>(params, host);
  }
};

}  // namespace flashcell::FLASHCELL_ISA
