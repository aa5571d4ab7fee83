// One decoding step on the CPU: the state is read once and written once.
#pragma once
#include "epilogue.h"
#include "head.h"

namespace flashcell::FLASHCELL_ISA {

template <typename IO>
struct Step {
  using T = State<IO>;
  using V = Vec<T>;
  using M = Matrix<IO>;
  // Rows of C processed together. With four, sums of h are read and written a quarter as often.
  // With one, C is a single stream: a Zen 3 prefetches it from its last-level cache by itself, and
  // from memory with software prefetches.
  static constexpr int kRows = kAsks ? 1 : 4;
  static constexpr int64_t kCached = 8 << 20;  // bytes of states that fit in the last-level cache

  const StepParams& p;
  const Host& caller;

  void run() const {
    const Host host = fitting(caller, p.B * p.H * p.K * p.V);
    parallel_ranges(host, p.B * p.H, [&](int64_t begin, int64_t end) {
      Scratch<T> rows(caller, 2 * (p.V + M::kWidth) + 2 * (p.K + M::kWidth));
      for (int64_t i = begin; i < end; ++i) head(i / p.H, i % p.H, rows);
    });
  }

  template <typename X>
  const X* at(const Strided& x, int64_t b, int64_t h) const {
    return (const X*)x.data + b * x.batch + h * x.head;
  }

  void head(int64_t b, int64_t h, T* rows) const {
    const int64_t i = b * p.H + h;
    T *value = rows, *sums = value + p.V + M::kWidth, *key = sums + p.V + M::kWidth,
      *query = key + p.K + M::kWidth;
    double m = p.m ? double(((const T*)p.m)[i]) : 0;
    T keep, add;
    gates(*at<T>(p.i, b, h), *at<T>(p.f, b, h), m, keep, add);
    if (!p.C && keep != keep) add = keep;  // a NaN must reach even an empty state
    if (p.next_m) ((T*)p.next_m)[i] = T(m);
    widen(key, at<IO>(p.k, b, h), p.K, add);
    widen(query, at<IO>(p.q, b, h), p.K, T(1 / __builtin_sqrt(double(p.K))));
    widen(value, at<IO>(p.v, b, h), p.V, T(1));
    memset(sums, 0, (p.V + M::kWidth) * sizeof(T));
    const T* C = p.C ? (const T*)p.C + i * p.K * p.V : nullptr;
    T* next = (T*)p.next_C + i * p.K * p.V;
    const bool far = kAsks && p.B * p.H * p.K * p.V * int64_t(sizeof(T)) > kCached;
    const auto run = !C    ? &Step::update<false, false>
                     : far ? &Step::update<true, true>
                           : &Step::update<true, false>;
    (this->*run)(C, next, value, sums, key, query, keep);
    T scale = 1;
    if (p.normalized) {
      const T* n = p.n ? (const T*)p.n + i * p.K : nullptr;
      T* next_n = (T*)p.next_n + i * p.K;
      T denominator = 0;
      for (int64_t k = 0; k < p.K; ++k) {
        next_n[k] = (n ? keep * n[k] : 0) + key[k];
        denominator += next_n[k] * query[k];
      }
      scale = T(1) / divisor(denominator, T(exp(Vec<double>(-m)).raw[0]), p.eps);
    }
    for (int64_t c = 0; c < p.V; c += M::kWidth) store(sums + c, load(sums + c) * V(scale));
    const IO* gate = p.epilogue.out_gate.data ? at<IO>(p.epilogue.out_gate, b, h) : nullptr;
    HeadEpilogue<IO>(p.epilogue, h, p.V).forward(sums, gate, (IO*)p.h + i * p.V);
  }

  // Uses vector functions because they are compiled in; libm's differ between machines.
  void gates(double i, double f, double& m, T& keep, T& add) const {
    using W = Vec<double>;
    const double log_f = at_least(logsigmoid(W(f)).raw[0], kShut);
    if (!p.exponential) {
      keep = T(exp(W(log_f)).raw[0]), add = T(exp(logsigmoid(W(i))).raw[0]);
      return;
    }
    const double log_i = at_least(i, kNever), carried = log_f + m;
    const bool absent = m < kNever;
    m = round_to<T>(larger(carried, log_i));
    keep = absent ? T(0) : T(exp(W(carried - m)).raw[0]);
    add = T(exp(W(log_i - m)).raw[0]);
  }

  FN static double at_least(double x, double least) { return x < least ? least : x; }

  FN static void widen(T* to, const IO* from, int64_t width, T scale) {
    M::for_columns(width, [&](int64_t c, int lanes, auto whole) __attribute__((always_inline)) {
      store(to + c, load_part<decltype(whole)::value>(from + c, lanes) * V(scale));
    });
  }

  template <bool Any, bool Far>
  void update(const T* C, T* next, const T* value, T* sums, const T* key, const T* query,
              T keep) const {
    for (int64_t row = 0; row < p.K; row += kRows, key += kRows, query += kRows) {
      const T* from = Any ? C + row * p.V : nullptr;
      T* to = next + row * p.V;
      M::for_columns(p.V, [&](int64_t c, int lanes, auto whole) __attribute__((always_inline)) {
        constexpr bool kWhole = decltype(whole)::value;
        if (Far) __builtin_prefetch(from + kRows * p.V + c, 1);
        const V v = load(value + c);
        V h = load(sums + c);
        for (int k = 0; k < kRows; ++k) {
          V x = V(key[k]) * v;
          if (Any) x += V(keep) * load_part<kWhole>(from + k * p.V + c, lanes);
          store_part<kWhole>(to + k * p.V + c, x, lanes);
          h += V(query[k]) * x;
        }
        store(sums + c, h);
      });
    }
  }
};

}  // namespace flashcell::FLASHCELL_ISA
