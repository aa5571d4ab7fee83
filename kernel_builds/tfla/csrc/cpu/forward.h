// The CPU's forward pass. Each chunk takes two products inside the chunk (q k and, weighted by the
// decays, the one with v), one with the state before it, and one that makes the state after it.
#pragma once
#include "head.h"

namespace flashcell::FLASHCELL_ISA {

template <typename IO>
struct Forward {
  using M = Matrix<IO>;
  using T = State<IO>;
  using V = Vec<T>;
  using E = Element<IO>;

  ForwardParams p;
  const Host& caller;
  const Host host;

  Forward(const ForwardParams& params, const Host& h)
      : p(fit_chunk(params)), caller(h), host(fitting(h, multiply_adds<IO>(p))) {}

  struct Buffers {
    int64_t pitch;  // elements between rows of a chunk's weights
    Gates<T> gates;
    Carry<IO> carry;
    Scratch<E> keys, values, state, left, copies;
    Scratch<T> scores, sums;
    Buffers(const Host& host, const MlstmParams& p)
        : pitch((p.chunk + 63) / 64 * 64),
          gates(host, p.chunk),
          carry(host, p.K, p.V),
          keys(host, M::packed_size(p.K, p.chunk)),
          values(host, M::packed_size(p.chunk, p.V)),
          state(host, M::packed_size(p.K, p.V)),
          left(host, (p.K > kTile ? p.K : kTile) * pitch),
          copies(host, kTile * p.K),
          scores(host, M::tile_size(kTile, p.chunk)),
          sums(host, M::tile_size(kTile, p.V)) {}
  };

  void run() {
    parallel_ranges(host, p.S * p.H, [&](int64_t begin, int64_t end) {
      Buffers b(caller, p);
      for_heads(p, begin, end, [&](const Sequence& s, int64_t head) { sequence({p, s, head}, b); });
    });
  }

  void sequence(const Head<IO>& x, Buffers& b) const {
    b.carry.load_from(p.C ? x.part(p.C, p.K * p.V) : nullptr, p.n ? x.part(p.n, p.K) : nullptr);
    b.gates.m = p.m ? *x.part(p.m, 1) : 0;
    for (int64_t c = 0; c < x.chunks(); ++c) {
      const int64_t row = x.row(c), steps = x.steps(c);
      b.gates.scan(p, row, x.head, steps);
      M::pack(b.values, x.at(p.v, row), p.v.time, steps, p.V);
      if (p.q.data) {
        M::pack_rows(b.keys, x.at(p.k, row), p.k.time, p.K, steps);
        const E* state = b.carry.any ? M::pack_tile(b.state, b.carry.C, p.K, p.V) : nullptr;
        for (int64_t r = 0; r < steps; r += kTile) tile(x, b, row, steps, r, state);
      }
      b.carry.update(T(b.gates.keep), x.at(p.k, row), p.k.time, b.gates.outflow,
                     p.normalized ? b.gates.outflow : nullptr, steps, b.values, b.left, b.pitch);
    }
    b.carry.store_to(x.part(p.last_C, p.K * p.V), p.last_n ? x.part(p.last_n, p.K) : nullptr);
    if (p.last_m) *x.part(p.last_m, 1) = T(b.gates.m);
    if (p.q.data == nullptr) return;
    for (int64_t row = s_end(x.s); row < s_end(x.s) + x.s.padding; ++row) {
      memset(x.template out<IO>(p.h, row, p.V), 0, p.V * sizeof(IO));
      if (p.total) *x.template out<T>(p.total, row, 1) = 0;
    }
  }

  static int64_t s_end(const Sequence& s) { return s.row + s.length; }

  // Computes h for the rows [first, first + kTile) of a chunk of `steps`, whose first row is `row`.
  void tile(const Head<IO>& x, Buffers& b, int64_t row, int64_t steps, int64_t first,
            const E* state) const {
    const int64_t count = steps - first < kTile ? steps - first : kTile, end = first + count;
    // Earlier keys belong to other documents.
    const int64_t begin = b.gates.start[first] / M::kStride * M::kStride;
    const E* queries[kTile];
    M::rows(queries, b.copies, x.at(p.q, row + first), p.q.time, count, p.K);
    M::product_to_lower(queries, count, b.keys + begin * M::padded(p.K), p.K,
                        b.scores + begin * count, end - begin, first - begin);
    T scale[kTile], inflow[kTile];
    const E* weights[kTile];
    for (int64_t r = 0; r < count; ++r) {
      weights[r] = b.left + r * b.pitch;
      scale[r] = weigh(x, b, row, first + r, r, count, begin, end);
      inflow[r] = b.gates.inflow[first + r] * T(query_scale(p));
    }
    for (int64_t n = 0; n < p.V; n += M::kStride) {
      T* panel = b.sums + n * count;
      if (state) {
        M::product(queries, count, 0, p.K, state + n * M::padded(p.K), p.K, panel, count,
                   M::kStride, false);
        for (int64_t r = 0; r < count; ++r) {
          for (int64_t i = r * M::kStride; i < (r + 1) * M::kStride; i += M::kWidth) {
            store(panel + i, inflow[r] == 0 ? V(0) : load(panel + i) * V(inflow[r]));
          }
        }
      } else {
        memset(panel, 0, count * M::kStride * sizeof(T));
      }
      if (kAsks) {
        const int64_t later = row + steps + first;
        fetch(x, later + n * count / p.V, later + (n + M::kStride) * count / p.V);
      }
      M::product_of_lower(weights, count, begin, first, b.values + n * M::padded(steps), panel);
    }
    for (int64_t r = 0; r < count; ++r) {
      IO* h = x.template out<IO>(p.h, row + first + r, p.V);
      if (p.hold && p.hold[row + first + r]) {  // its weights are 0, but 0 times NaN in v is NaN
        memset(h, 0, p.V * sizeof(IO));
        continue;
      }
      M::for_columns(p.V, [&](int64_t c, int lanes, auto whole) __attribute__((always_inline)) {
        if (kAsks) __builtin_prefetch(h + p.H * p.V + c, 1);  // the next row
        store_part<decltype(whole)::value>(h + c, load(b.sums + M::at(count, r, c)) * V(scale[r]),
                                           lanes);
      });
    }
  }

  // Prefetches rows [row, end) of the next chunk while this one is multiplied: they lie too far
  // apart for the hardware prefetcher.
  void fetch(const Head<IO>& x, int64_t row, int64_t end) const {
    constexpr int64_t kLine = 64 / sizeof(IO);
    for (; row < end && row < s_end(x.s); ++row) {
      const IO *q = x.at(p.q, row), *k = x.at(p.k, row), *v = x.at(p.v, row);
      for (int64_t c = 0; c < p.K; c += kLine) {
        __builtin_prefetch(q + c, 0, 2), __builtin_prefetch(k + c, 0, 2);
      }
      for (int64_t c = 0; c < p.V; c += kLine) __builtin_prefetch(v + c, 0, 2);
    }
  }

  // Writes row t's weights of the steps [begin, end), as left operand, and returns 1 / divisor.
  T weigh(const Head<IO>& x, Buffers& b, int64_t row, int64_t t, int64_t r, int64_t count,
          int64_t begin, int64_t end) const {
    const Gates<T>& g = b.gates;
    const T scale = T(query_scale(p));
    E* to = b.left + r * b.pitch;
    V total(0);
    int64_t j = begin;
    for (; j <= t; j += M::kWidth) {
      const V score = load(b.scores + M::at(count, r, j));
      const V weight = seen(g, t, j, pair_decay(g, t, j) * V(scale) * score);
      total += weight;
      store_element(to + j, weight);
    }
    for (; j < M::padded(end); j += M::kWidth) store_element(to + j, V(0));
    if (!p.normalized) return T(1);
    T denominator = sum(total);
    if (b.carry.any && g.inflow[t] != 0) {
      denominator += g.inflow[t] * scale * dot(x.at(p.q, row + t), b.carry.n, p.K);
    }
    *x.template out<T>(p.total, row + t, 1) = denominator;
    return T(1) / divisor(denominator, g.floor[t], p.eps);
  }
};

}  // namespace flashcell::FLASHCELL_ISA
