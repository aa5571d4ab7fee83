// One decoding step of a whole residual block in a single parallel region. Its threads wait for
// each other twice, by spinning on a counter in the cache; separate ops would be six parallel
// regions.
//
//   1  u = in_proj norm(x), r = weight h, cell: mid = x + h'
//   2  inner = silu(gate norm(mid)) * up norm(mid)
//   3  out = mid + down inner, and h becomes h'
//
// The state h changes only in phase 3, because other threads may still read it in phase 1.
#pragma once
#include "common/cpu/quantized.h"
#include "common/cpu/scratch.h"
#include "common/cpu/vec_math.h"
#include "dot.h"
#include "phases.h"

namespace flashcell::FLASHCELL_ISA {

// W is the type of the linear layers' weights: IO, or int8<IO> or int4<IO> with scales.
template <typename Cell, typename IO, typename W>
struct BlockStep {
  using T = State<IO>;
  using V = Vec<T>;
  using E = Element<W>;        // of rows that meet the linear layers
  using EState = Element<IO>;  // of rounded h, which meets the recurrent weight
  static constexpr int G = Cell::kGates, K = Cell::kStates;
  static_assert(K <= BlockStepParams::kMostStates);
  static constexpr int kRows = 8;      // rows of x that share one pass of a task over its weights
  static constexpr int kColumns = 64;  // most columns of a task
  // Columns of a task are a multiple of this: a cache line of fp32, written by one thread.
  static constexpr int kLine = 16;
  static constexpr int kTasks = 4;  // tasks per thread and phase, so that no thread waits for long
  static constexpr bool kRounds = sizeof(IO) != sizeof(T);  // h must be rounded before the product
  // From this much work on a second thread gains: twice what it takes for one linear layer (tfla).
  static constexpr int64_t kWorth = 128 * 1024;

  const BlockStepParams& p;
  const int64_t H = p.N * p.D;
  const Host host;
  Scratch<T> mid, h;        // [B, H]
  Scratch<E> inner;         // [B, I]
  Scratch<E> normed;        // [threads][B, H]: normed rows
  Scratch<EState> rounded;  // [threads][B, H]: rounded h
  mutable Phase phases[3];

  BlockStep(const BlockStepParams& params, const Host& caller)
      : p(params),
        host(p.B * (G * (H + p.D) + 3 * p.I) * H < kWorth ? fitting(caller, 0) : caller),
        mid(host, p.B * H),
        h(host, p.B * H),
        inner(host, p.B * p.I),
        normed(host, host.threads * p.B * H),
        rounded(host, kRounds ? host.threads * p.B * H : 0) {}

  void run() const {
    if (p.B * H == 0) return;
    parallel_ranges(host, host.threads, [&](int64_t begin, int64_t) {
      E* const own = normed + begin * p.B * H;
      EState* const own_h = rounded + (kRounds ? begin * p.B * H : 0);
      const int width = columns(H), inside = columns(p.I), units = columns(p.D, p.N);
      const int64_t panels = (p.D + units - 1) / units;
      // A thread prepares x in its first task only: one without a task would come late, and read
      // what later phases may already change.
      bool ready = false;
      share(phases[0], p.N * panels, [&](int64_t task) {
        if (!ready) prepare((const IO*)p.x, p.x_stride, p.mixer_norm, p.mixer_eps, own);
        if (!ready && kRounds) round_states(own_h);
        ready = true;
        mix(task / panels, task % panels * units, units, own, own_h);
      });
      ready = false;
      share(phases[1], (p.I + inside - 1) / inside, [&](int64_t task) {
        if (!ready) prepare((const T*)mid, H, p.mlp_norm, p.mlp_eps, own);
        ready = true;
        gate(task * inside, inside, own);
      });
      share(phases[2], (H + width - 1) / width, [&](int64_t task) { finish(task * width, width); });
    });
  }

  // Returns the number of columns of a task, where `parts` times `count` columns are shared out.
  int columns(int64_t count, int64_t parts = 1) const {
    const int64_t fair = count * parts / (host.threads * kTasks);
    const int64_t lines = (fair + kLine - 1) / kLine * kLine;
    return int(lines < kLine ? kLine : lines > kColumns ? kColumns : lines);
  }

  // Calls body(b, rows of x) for groups of at most kRows rows.
  template <typename Body>
  FN void for_rows(const Body& body) const {
    for (int64_t b = 0; b < p.B; b += kRows) body(b, int(p.B - b < kRows ? p.B - b : kRows));
  }
  // Calls body(column, lanes, whole) for every vector of `count` columns.
  template <typename Body>
  FN static void for_vectors(int64_t count, const Body& body) {
    int64_t c = 0;
    for (; c + V::kWidth <= count; c += V::kWidth) body(c, V::kWidth, Whole());
    if (c < count) body(c, int(count - c), Part());
  }
  struct Whole {
    static constexpr bool value = true;
  };
  struct Part {
    static constexpr bool value = false;
  };

  template <bool kWhole, typename To>
  FN static void put(To* to, V v, int lanes) {
    if (kWhole) return store_operand<IO>(to, v);
    To part[V::kWidth];
    store_operand<IO>(part, v);
    memcpy(to, part, lanes * sizeof(To));
  }

  // Returns sums of products times the factors of their rows, if rows have any.
  template <bool kWhole>
  FN static V scaled(V sums, const void* scale, int64_t at, int lanes) {
    if constexpr (kIsInt8<W>) return sums * load_scales<kWhole, T>((const float*)scale + at, lanes);
    return sums;
  }

  // Computes x / sqrt(mean(x^2) + eps) * norm for every row, as an operand of the product.
  template <typename From>
  void prepare(const From* x, int64_t stride, const void* norm, double eps, E* to) const {
    for (int64_t b = 0; b < p.B; ++b, x += stride, to += H) {
      V squares(0);
      for_vectors(H, [&](int64_t k, int lanes, auto whole) __attribute__((always_inline)) {
        const V part = load_part<decltype(whole)::value>(x + k, lanes);
        squares += part * part;
      });
      const V inverse(T(1 / __builtin_sqrt(double(sum(squares)) / double(H) + eps)));
      for_vectors(H, [&](int64_t k, int lanes, auto whole) __attribute__((always_inline)) {
        constexpr bool kWhole = decltype(whole)::value;
        const V weight = load_part<kWhole>((const IO*)norm + k, lanes);
        put<kWhole>(to + k, load_part<kWhole>(x + k, lanes) * inverse * weight, lanes);
      });
    }
  }

  void round_states(EState* to) const {
    for_vectors(p.B * H, [&](int64_t k, int lanes, auto whole) __attribute__((always_inline)) {
      constexpr bool kWhole = decltype(whole)::value;
      put<kWhole>(to + k, load_part<kWhole>((const T*)p.states[0] + k, lanes), lanes);
    });
  }

  // Phase 1 for the units [unit, unit + count) of a head, clipped to its width.
  void mix(int64_t head, int64_t unit, int64_t count, const E* own, const EState* own_h) const {
    const int units = int(p.D - unit < count ? p.D - unit : count);
    const int64_t at = head * p.D + unit;
    const Row<W> all = RowOf<W>::first(p.in_proj, p.scales[0]);
    Row<W> projection[G];
    const IO* recurrence[G];
    for (int g = 0; g < G; ++g) {
      projection[g] = RowOf<W>::at(all, g * H + at, H);
      recurrence[g] = (const IO*)p.weight + ((g * p.N + head) * p.D + unit) * p.D;
    }
    const EState* const old = kRounds ? own_h : (const EState*)p.states[0];
    alignas(kVectorBytes) T u[kRows][G][kColumns], r[kRows][G][kColumns];
    for_rows([&](int64_t b, int rows) {
      const E* x[kRows];
      const EState* states[kRows];
      for (int m = 0; m < rows; ++m) {
        x[m] = own + (b + m) * H, states[m] = old + (b + m) * H + head * p.D;
      }
      constexpr int kStride = G * kColumns;
      dot_rows<W, G, kRows>(x, rows, projection, H, units, u[0][0], kStride, kColumns);
      dot_rows<IO, G, kRows>(states, rows, recurrence, p.D, units, r[0][0], kStride, kColumns);
      for (int m = 0; m < rows; ++m) {
        for_vectors(units, [&](int64_t v, int lanes, auto whole) __attribute__((always_inline)) {
          cell<decltype(whole)::value>(b + m, at + v, lanes, u[m][0] + v, r[m][0] + v);
        });
      }
    });
  }

  // Runs the cell for units from column `at` of row b on; gates of u and r are kColumns apart.
  template <bool kWhole>
  FN void cell(int64_t b, int64_t at, int lanes, const T* u, const T* r) const {
    V x[G], product[G], now[K], next[K], saved[Cell::kSaved];
    for (int g = 0; g < G; ++g) {
      x[g] = scaled<kWhole>(load(u + g * kColumns), p.scales[0], g * H + at, lanes);
      product[g] = load(r + g * kColumns);
      if (p.bias) x[g] += load_part<kWhole>((const IO*)p.bias + g * H + at, lanes);
    }
    if (p.bias && Cell::kBias > G) {
      product[G - 1] += load_part<kWhole>((const IO*)p.bias + G * H + at, lanes);
    }
    const int64_t to = b * H + at;
    for (int k = 0; k < K; ++k) now[k] = load_part<kWhole>((const T*)p.states[k] + to, lanes);
    Cell::forward(x, product, now, next, saved);
    for (int k = 1; k < K; ++k) store_part<kWhole>((T*)p.states[k] + to, next[k], lanes);
    store_part<kWhole>(h + to, next[0], lanes);
    const V residual = load_part<kWhole>((const IO*)p.x + b * p.x_stride + at, lanes);
    store_part<kWhole>(mid + to, residual + next[0], lanes);
  }

  // Phase 2 for the columns [at, at + count) inside the SwiGLU, clipped to its width.
  void gate(int64_t at, int64_t count, const E* own) const {
    const int width = int(p.I - at < count ? p.I - at : count);
    const Row<W> pair[2] = {RowOf<W>::at(RowOf<W>::first(p.gate, p.scales[1]), at, H),
                            RowOf<W>::at(RowOf<W>::first(p.up, p.scales[2]), at, H)};
    alignas(kVectorBytes) T y[kRows][2][kColumns];
    for_rows([&](int64_t b, int rows) {
      const E* x[kRows];
      for (int m = 0; m < rows; ++m) x[m] = own + (b + m) * H;
      dot_rows<W, 2, kRows>(x, rows, pair, H, width, y[0][0], 2 * kColumns, kColumns);
      for (int m = 0; m < rows; ++m) {
        for_vectors(width, [&](int64_t v, int lanes, auto whole) __attribute__((always_inline)) {
          constexpr bool kWhole = decltype(whole)::value;
          const V gated = scaled<kWhole>(load(y[m][0] + v), p.scales[1], at + v, lanes);
          const V up = scaled<kWhole>(load(y[m][1] + v), p.scales[2], at + v, lanes);
          put<kWhole>(inner + (b + m) * p.I + at + v, gated * sigmoid(gated) * up, lanes);
        });
      }
    });
  }

  // Phase 3 for the columns [at, at + count) of the output and the state, clipped to the width.
  void finish(int64_t at, int64_t count) const {
    const int width = int(H - at < count ? H - at : count);
    const Row<W> down = RowOf<W>::at(RowOf<W>::first(p.down, p.scales[3]), at, p.I);
    alignas(kVectorBytes) T y[kRows][kColumns];
    for_rows([&](int64_t b, int rows) {
      const E* inside[kRows];
      for (int m = 0; m < rows; ++m) inside[m] = inner + (b + m) * p.I;
      dot_rows<W, 1, kRows>(inside, rows, &down, p.I, width, y[0], kColumns);
      for (int m = 0; m < rows; ++m) {
        const int64_t to = (b + m) * H + at;
        memcpy((T*)p.states[0] + to, h + to, width * sizeof(T));
        for_vectors(width, [&](int64_t v, int lanes, auto whole) __attribute__((always_inline)) {
          constexpr bool kWhole = decltype(whole)::value;
          const V product = scaled<kWhole>(load(y[m] + v), p.scales[3], at + v, lanes);
          const V sum = product + load_part<kWhole>(mid + to + v, lanes);
          store_part<kWhole>((IO*)p.out + to + v, sum, lanes);
        });
      }
    });
  }
};

}  // namespace flashcell::FLASHCELL_ISA
