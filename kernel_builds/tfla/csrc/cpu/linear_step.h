// The linear layers of one decoding step: rows of x times rows of weights, both read in place.
// Every weight is read once for eight rows of x. A sum depends neither on the number of rows nor on
// the number of threads.
#pragma once
#include "common/cpu/quantized.h"
#include "matrix.h"

namespace flashcell::FLASHCELL_ISA {

template <typename IO>
struct LinearStep {
  using T = State<IO>;
  using V = Vec<T>;
  static constexpr int kWidth = V::kWidth;
  // Rows of a matrix that go to one thread together.
  static constexpr int kGroup = kWidth > 8 ? kWidth : 8;
  // The number of strips in which rows are read at once, each strip from its first row to its last.
  // A core prefetches along a few long streams: 90 GB/s, where reading row after row reached 42 (1
  // MB from the L3 of a Zen 3, two threads).
  static constexpr int kStrips = 8;
  // Strips multiplied together: their sums with three rows of x fill the registers. With two rows,
  // a product of eight rows took 3.3 multiply-adds a ns on a Zen 3, with three 4.3 (fused-rnn's
  // dot.h has the same loops).
  static constexpr int kTogether = 4;
  // Sums kept until bias, gate and residual are applied.
  static constexpr int kMostRows = 256, kMostInputs = 8;
  // From this much work on a second thread gains: half of 256 KB takes 3 us from the cache, as long
  // as waiting for it.
  static constexpr int64_t kWorth = 64 * 1024;

  const LinearStepParams& p;
  const Host& caller;

  bool in_place() const { return sizeof(T) == sizeof(IO) && !p.norm; }
  int matrices() const { return p.gated ? 1 : p.count; }  // matrices with outputs of their own

  void run() const {
    int64_t groups = 0, rows = 0;
    for (int s = 0; s < p.count; ++s) rows += p.linears[s].rows;
    for (int s = 0; s < matrices(); ++s) groups += groups_of(s);
    if (p.B == 0 || groups == 0) return;
    Scratch<T> copies(caller, in_place() ? 0 : p.B * p.K);
    if (!in_place()) {
      for (int64_t b = 0; b < p.B; ++b) prepare(b, copies + b * p.K);
    }
    const T* const x = in_place() ? (const T*)p.x : copies;
    const int64_t stride = in_place() ? p.x_stride : p.K;
    const Host host = p.B * rows * p.K < kWorth ? fitting(caller, 0) : caller;
    parallel_ranges(host, groups, [&](int64_t begin, int64_t end) {
      int64_t first = 0;  // index of the first group of matrix s
      for (int s = 0; s < matrices(); first += groups_of(s++)) {
        const int64_t from = (begin > first ? begin - first : 0) * kGroup;
        int64_t to = (end - first) * kGroup;
        if (to > p.linears[s].rows) to = p.linears[s].rows;
        for (int64_t row = from; row < to; row += kMostRows) {
          const int count = int(to - row < kMostRows ? to - row : kMostRows);
          for (int64_t b = 0; b < p.B; b += kMostInputs) {
            const int inputs = int(p.B - b < kMostInputs ? p.B - b : kMostInputs);
            block(s, row, count, b, inputs, x + b * stride, stride);
          }
        }
      }
    });
  }

  int64_t groups_of(int s) const { return (p.linears[s].rows + kGroup - 1) / kGroup; }

  // Widens and norms a row of x.
  void prepare(int64_t b, T* to) const {
    const IO* x = (const IO*)p.x + b * p.x_stride;
    V squares(0);
    for_columns([&](int64_t k, int lanes, auto whole) __attribute__((always_inline)) {
      const V part = load_part<decltype(whole)::value>(x + k, lanes);
      squares += part * part;
      store_part<decltype(whole)::value>(to + k, part, lanes);
    });
    if (!p.norm) return;
    const V inverse(T(1 / __builtin_sqrt(double(sum(squares)) / double(p.K) + p.eps)));
    for_columns([&](int64_t k, int lanes, auto whole) __attribute__((always_inline)) {
      constexpr bool kWhole = decltype(whole)::value;
      const V weight = load_part<kWhole>((const IO*)p.norm + k, lanes);
      store_part<kWhole>(to + k, load_part<kWhole>(to + k, lanes) * inverse * weight, lanes);
    });
  }

  template <typename Body>
  FN void for_columns(const Body& body) const {
    Matrix<IO>::for_columns(p.K, body);
  }

  // Computes rows [row, row + count) of matrix s (of both matrices if gated) for `inputs` rows of
  // x.
  void block(int s, int64_t row, int count, int64_t b, int inputs, const T* x,
             int64_t stride) const {
    alignas(kVectorBytes) T sums[2][kMostInputs][kMostRows];
    for (int j = 0; j <= int(p.gated); ++j) {
      const Linear& linear = p.linears[s + j];
      if (linear.scale && p.format == Format::kInt4) {
        products<int4<IO>>(linear, row, count, inputs, x, stride, sums[j]);
      } else if (linear.scale) {
        products<int8<IO>>(linear, row, count, inputs, x, stride, sums[j]);
      } else {
        products<IO>(linear, row, count, inputs, x, stride, sums[j]);
      }
    }
    const Linear& linear = p.linears[s];
    for (int m = 0; m < inputs; ++m) {
      for (int v = 0; v < count; v += kWidth) {
        const V y = load(sums[0][m] + v), up = load(sums[1][m] + v);
        count - v >= kWidth ? finish<true>(linear, b + m, row + v, kWidth, y, up)
                            : finish<false>(linear, b + m, row + v, count - v, y, up);
      }
    }
  }

  template <bool Whole>
  FN void finish(const Linear& linear, int64_t b, int64_t row, int lanes, V y, V up) const {
    if (linear.scale && p.format == Format::kInt8) {
      const auto factors = [&](const void* scale) __attribute__((always_inline)) {
        return load_scales<Whole, T>((const float*)scale + row, lanes);
      };
      y = y * factors(linear.scale);
      if (p.gated) up = up * factors(p.linears[1].scale);
    }
    if (linear.bias) y += load_part<Whole>((const IO*)linear.bias + row, lanes);
    if (p.gated) y = y * sigmoid(y) * up;
    if (p.residual) {
      y += load_part<Whole>((const IO*)p.residual + b * p.residual_stride + row, lanes);
    }
    const int64_t at = b * linear.out_stride + row;
    if (!linear.capped) return store_part<Whole>((IO*)linear.out + at, y, lanes);
    if (p.cap > 0) y = V(T(p.cap)) * tanh(y / V(T(p.cap)));
    store_part<Whole>((T*)linear.out + at, y, lanes);
  }

  template <typename W>
  void products(const Linear& linear, int64_t row, int count, int inputs, const T* x,
                int64_t stride, T (&sums)[kMostInputs][kMostRows]) const {
    const int strip = (count + kStrips - 1) / kStrips;
    const Row<W> first = RowOf<W>::first(linear.weight, linear.scale);
    for (int r = 0; r < strip; ++r) {
      Row<W> weights[kStrips];
      int at[kStrips];
      for (int j = 0; j < kStrips; ++j) {  // strips past the last row repeat it
        at[j] = j * strip + r < count ? j * strip + r : count - 1;
        weights[j] = RowOf<W>::at(first, row + at[j], p.K);
      }
      if (inputs == 1) {
        tile<1, kStrips>(weights, x, stride, sums, at);
        continue;
      }
      // All rows of x meet four strips before the next four: eight strips, a power of two apart,
      // would evict each other from the first-level cache.
      for (int j = 0; j < kStrips; j += kTogether) {
        for (int m = 0; m < inputs;) {
          const int left = inputs - m;
          if (left >= 3 && left != 4) {
            tile<3, kTogether>(weights + j, x + m * stride, stride, sums + m, at + j), m += 3;
          } else {
            tile<2, kTogether>(weights + j, x + m * stride, stride, sums + m, at + j), m += 2;
          }
        }
      }
    }
  }

  template <int M, int R, typename Row>
  FN void tile(const Row* weights, const T* x, int64_t stride, T (*sums)[kMostRows],
               const int* at) const {
    V acc[M][R];
#pragma GCC unroll 8
    for (int j = 0; j < R; ++j) {
#pragma GCC unroll 3
      for (int m = 0; m < M; ++m) acc[m][j] = V(0);
    }
    multiply(weights, x, stride, acc);
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int j = 0; j < R; ++j) sums[m][at[j]] = sum(acc[m][j]);
    }
  }

  template <int M, int R>
  FN void multiply(const Int4Row* weights, const T* x, int64_t stride, V (&acc)[M][R]) const {
    const T* rows[M];
    for (int m = 0; m < M; ++m) rows[m] = x + m * stride;
    multiply_int4(weights, rows, p.K, acc);
  }
  template <int M, int R, typename W>
  FN void multiply(const W* const* weights, const T* x, int64_t stride, V (&acc)[M][R]) const {
    for_columns([&](int64_t k, int lanes, auto whole) __attribute__((always_inline)) {
      constexpr bool kWhole = decltype(whole)::value;
      V a[M];
#pragma GCC unroll 3
      for (int m = 0; m < M; ++m) a[m] = load_part<kWhole>(x + m * stride + k, lanes);
#pragma GCC unroll 8
      for (int j = 0; j < R; ++j) {
        const V w = load_part<kWhole>(weights[j] + k, lanes);
#pragma GCC unroll 3
        for (int m = 0; m < M; ++m) acc[m][j] += a[m] * w;
      }
    });
  }
};

}  // namespace flashcell::FLASHCELL_ISA
