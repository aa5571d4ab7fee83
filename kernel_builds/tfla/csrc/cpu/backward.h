// The CPU's backward pass. It recomputes the states chunk by chunk in order, then runs through the
// chunks in reverse with the gradient of the state. README.md, "Gradients", has the equations.
#pragma once
#include "head.h"

namespace flashcell::FLASHCELL_ISA {

// Most bytes of states that one thread keeps at a time.
constexpr int64_t kSnapshotBytes = 32 << 20;

// In a row whose divisor has lost all but 1/32 of its terms' size to cancellation, the slope,
// divided by the square of that divisor, may dominate a gradient. It must then not come from a
// rounded C: NOTEBOOK.md, "Layout on the CPU".
constexpr double kCancelled = 1.0 / (32 * 32);

// A vector of T converted to double, in as many vectors as that takes.
template <typename T>
struct Wide {
  static constexpr int kParts = sizeof(double) / sizeof(T);
  Vec<double> parts[kParts];

  FN void add(const Wide& other) {
    for (int i = 0; i < kParts; ++i) parts[i] += other.parts[i];
  }
  FN void add_to(double* sums) const {
    for (int i = 0; i < kParts; ++i, sums += Vec<double>::kWidth) {
      store(sums, load(sums) + parts[i]);
    }
  }
  FN double total() const {
    double total = 0;
    for (int i = 0; i < kParts; ++i) total += sum(parts[i]);
    return total;
  }
};
FN Wide<double> widen(Vec<double> x) { return {{x}}; }
FN Wide<float> widen(Vec<float> x) {
  typedef float Half __attribute__((vector_size(kVectorBytes / 2)));
  Half halves[2];
  memcpy(halves, &x.raw, sizeof halves);
  using Raw = Vec<double>::Raw;
  return {{__builtin_convertvector(halves[0], Raw), __builtin_convertvector(halves[1], Raw)}};
}

// The gradient of a log forget gate is what crosses it: the flow from steps before it to steps from
// it on. It is a sum of four flows, none of which is a difference of larger ones: through the whole
// chunk, from the state before it, to the state after it, and between its steps. Only the last
// comes from sums over rows minus sums over columns. Both sum the same numbers in double, so the
// part that does not cross a shut gate cancels to 2^-53 of its size and does not hide the small
// part that does.
template <typename IO>
struct Backward {
  using M = Matrix<IO>;
  using T = State<IO>;
  using V = Vec<T>;
  using E = Element<IO>;

  BackwardParams p;
  const Host& caller;
  const Host host;
  const bool has_h;  // whether h has a gradient
  const Strided dh;

  Backward(const BackwardParams& params, const Host& h)
      : p(fit_chunk(params)),
        caller(h),
        host(fitting(h, 3 * multiply_adds<IO>(p))),
        has_h(p.dh && p.q.data),
        dh{p.dh, p.T * p.H * p.V, p.H * p.V, p.V} {}

  struct Buffers {
    int64_t pitch, group;  // steps in a row of operands, and chunks whose states are kept together
    Gates<T> gates;
    Carry<IO> state, d;  // state before the chunk, and gradient of the state after it
    Snapshots<IO> starts, states;
    Scratch<E> keys_t, keys, values_t, values, queries, outputs, state_t, d_t, d_packed;
    Scratch<E> left, left_t, weights_t, copies;
    Scratch<T> scores, grads, decays, from_state, dq, dk, dv;
    Scratch<double> in, out;  // flows between steps of the chunk: into each step, and out of it
    // Flows from the state before the chunk, and to the state after it.
    Scratch<T> state_in, state_out;
    Scratch<double> crossing;
    Scratch<T> weight, n_weight;
    double through;  // flow from before the chunk to after it

    Buffers(const Host& host, const MlstmParams& p)
        : pitch((p.chunk + 63) / 64 * 64),
          group(group_of(p)),
          gates(host, p.chunk),
          state(host, p.K, p.V),
          d(host, p.K, p.V),
          starts(host, (most(p) + group - 1) / group, state),
          states(host, group < most(p) ? group : most(p), state),
          keys_t(host, M::packed_size(p.K, p.chunk)),
          keys(host, M::packed_size(p.chunk, p.K)),
          values_t(host, M::packed_size(p.V, p.chunk)),
          values(host, M::packed_size(p.chunk, p.V)),
          queries(host, M::packed_size(p.chunk, p.K)),
          outputs(host, M::packed_size(p.chunk, p.V)),
          state_t(host, M::packed_size(p.V, p.K)),
          d_t(host, M::packed_size(p.V, p.K)),
          d_packed(host, M::packed_size(p.K, p.V)),
          left(host, (p.K > kTile ? p.K : kTile) * pitch),
          left_t(host, pitch * kTile),
          weights_t(host, pitch * kTile),
          copies(host, 2 * kTile * (p.K > p.V ? p.K : p.V)),
          scores(host, M::tile_size(kTile, p.chunk)),
          grads(host, M::tile_size(kTile, p.chunk)),
          decays(host, M::tile_size(kTile, p.chunk)),
          from_state(host, M::tile_size(kTile, p.K)),
          dq(host, M::tile_size(kTile, p.K)),
          dk(host, M::tile_size(p.chunk, p.K)),
          dv(host, M::tile_size(p.chunk, p.V)),
          in(host, pitch),
          out(host, pitch),
          state_in(host, pitch),
          state_out(host, pitch),
          crossing(host, pitch),
          weight(host, pitch),
          n_weight(host, pitch) {}

    static int64_t most(const MlstmParams& p) {  // number of chunks of the longest sequence
      const int64_t steps = p.S ? p.sequences[0].length : 0;
      return steps ? (steps + p.chunk - 1) / p.chunk : 1;
    }
    // As many chunks as fit, but at least the square root of all, which keeps both lists of
    // snapshots short.
    static int64_t group_of(const MlstmParams& p) {
      const int64_t state = M::tile_size(p.K, p.V) * sizeof(T);
      int64_t group = kSnapshotBytes / state;
      if (group < 1) group = 1;
      while (group * group < most(p)) ++group;
      return group;
    }
  };

  void run() {
    parallel_ranges(host, p.S * p.H, [&](int64_t begin, int64_t end) {
      Buffers b(caller, p);
      for_heads(p, begin, end, [&](const Sequence& s, int64_t head) { sequence({p, s, head}, b); });
    });
  }

  void sequence(const Head<IO>& x, Buffers& b) const {
    const int64_t size = p.K * p.V, chunks = x.chunks();
    b.d.load_from(p.dlast_C ? x.part(p.dlast_C, size) : nullptr,
                  p.dlast_n ? x.part(p.dlast_n, p.K) : nullptr);
    b.state.load_from(p.C ? x.part(p.C, size) : nullptr, p.n ? x.part(p.n, p.K) : nullptr);
    b.gates.m = p.m ? *x.part(p.m, 1) : 0;
    const int64_t groups = (chunks + b.group - 1) / b.group;
    for (int64_t g = 0; g < groups; ++g) {
      b.starts.save(g, b.state, b.gates.m);
      for (int64_t c = g * b.group; g + 1 < groups && c < (g + 1) * b.group; ++c) advance(x, b, c);
    }
    for (int64_t g = groups - 1; g >= 0; --g) {
      const int64_t first = g * b.group, end = first + b.group < chunks ? first + b.group : chunks;
      b.gates.m = b.starts.load(g, b.state);
      for (int64_t c = first; c < end; ++c) {
        b.states.save(c - first, b.state, b.gates.m);
        if (c + 1 < end) advance(x, b, c);
      }
      for (int64_t c = end - 1; c >= first; --c) {
        b.gates.m = b.states.load(c - first, b.state);
        chunk(x, b, c);
      }
    }
    b.d.store_to(x.part(p.dC, size), p.dn ? x.part(p.dn, p.K) : nullptr);
    for (int64_t row = x.s.row + x.s.length; row < x.s.row + x.s.length + x.s.padding; ++row) {
      if (p.dq) memset(x.template out<IO>(p.dq, row, p.K), 0, p.K * sizeof(IO));
      memset(x.template out<IO>(p.dk, row, p.K), 0, p.K * sizeof(IO));
      memset(x.template out<IO>(p.dv, row, p.V), 0, p.V * sizeof(IO));
      *x.template out<T>(p.di, row, 1) = *x.template out<T>(p.df, row, 1) = 0;
    }
  }

  // Advances to the state after chunk c.
  void advance(const Head<IO>& x, Buffers& b, int64_t c) const {
    const int64_t row = x.row(c), steps = x.steps(c);
    b.gates.scan(p, row, x.head, steps);
    M::pack(b.values, x.at(p.v, row), p.v.time, steps, p.V);
    b.state.update(T(b.gates.keep), x.at(p.k, row), p.k.time, b.gates.outflow,
                   p.normalized ? b.gates.outflow : nullptr, steps, b.values, b.left, b.pitch);
  }

  void chunk(const Head<IO>& x, Buffers& b, int64_t c) const {
    const int64_t row = x.row(c), steps = x.steps(c);
    b.gates.scan(p, row, x.head, steps);
    from_next_state(x, b, row, steps);
    const bool passes = b.state.any && b.d.any && b.gates.keep != 0;
    b.through = passes ? b.gates.keep * b.state.dot(b.d) : 0;
    memset(b.in, 0, b.pitch * sizeof(double)), memset(b.out, 0, b.pitch * sizeof(double));
    memset(b.state_in, 0, b.pitch * sizeof(T));
    if (has_h) {
      pack(x, b, row, steps);
      for (int64_t r = 0; r < steps; r += kTile) tile(x, b, row, steps, r);
    } else if (p.dq) {
      for (int64_t t = 0; t < steps; ++t) {
        memset(x.template out<IO>(p.dq, row + t, p.K), 0, p.K * sizeof(IO));
      }
    }
    for (int64_t t = 0; t < steps; ++t) {
      store_row(x.template out<IO>(p.dk, row + t, p.K), b.dk, steps, t, p.K);
      store_row(x.template out<IO>(p.dv, row + t, p.V), b.dv, steps, t, p.V);
    }
    gates(x, b, row, steps);
    if (has_h) {
      b.d.update(T(b.gates.keep), x.at(p.q, row), p.q.time, b.weight,
                 p.normalized ? b.n_weight.data : nullptr, steps, b.outputs, b.left, b.pitch);
    } else {
      b.d.scale(T(b.gates.keep));
    }
  }

  // Computes the share of k_j, v_j and the input gate of step j in the gradient of the state after
  // the chunk.
  void from_next_state(const Head<IO>& x, Buffers& b, int64_t row, int64_t steps) const {
    memset(b.state_out, 0, b.pitch * sizeof(T));
    if (!b.d.any) {
      memset(b.dk, 0, M::tile_size(steps, p.K) * sizeof(T));
      memset(b.dv, 0, M::tile_size(steps, p.V) * sizeof(T));
      return;
    }
    M::pack_transposed(b.d_t, b.d.C, p.K, p.V);
    const E* packed = M::pack_tile(b.d_packed, b.d.C, p.K, p.V);
    for (int64_t r = 0; r < steps; r += kTile) {
      const int64_t count = steps - r < kTile ? steps - r : kTile;
      const E* rows[kTile];
      M::rows(rows, b.copies, x.at(p.v, row + r), p.v.time, count, p.V);
      M::product(rows, count, 0, p.V, b.d_t, p.V, b.dk + r * M::kStride, steps, p.K, false);
      M::rows(rows, b.copies, x.at(p.k, row + r), p.k.time, count, p.K);
      M::product(rows, count, 0, p.K, packed, p.K, b.dv + r * M::kStride, steps, p.V, false);
    }
    for (int64_t t = 0; t < steps; ++t) {
      const T weight = b.gates.outflow[t];
      scale_row(b.dk, steps, t, p.K, weight, p.normalized ? b.d.n.data : nullptr, weight);
      scale_row(b.dv, steps, t, p.V, weight, nullptr, T(0));
      if (weight != 0) b.state_out[t] = dot(x.at(p.k, row + t), b.dk.data, steps, t, p.K);
    }
  }

  void pack(const Head<IO>& x, Buffers& b, int64_t row, int64_t steps) const {
    M::pack_rows(b.keys_t, x.at(p.k, row), p.k.time, p.K, steps);
    M::pack(b.keys, x.at(p.k, row), p.k.time, steps, p.K);
    M::pack_rows(b.values_t, x.at(p.v, row), p.v.time, p.V, steps);
    M::pack(b.queries, x.at(p.q, row), p.q.time, steps, p.K);
    M::pack(b.outputs, x.at(dh, row), dh.time, steps, p.V);
    if (b.state.any) M::pack_transposed(b.state_t, b.state.C, p.K, p.V);
  }

  // Computes dq of the rows [first, first + kTile), and their shares of dk and dv.
  void tile(const Head<IO>& x, Buffers& b, int64_t row, int64_t steps, int64_t first) const {
    const int64_t count = steps - first < kTile ? steps - first : kTile, end = first + count;
    const int64_t skipped = b.gates.start[first] / M::kStride, begin = skipped * M::kStride;
    const E *queries[kTile], *outputs[kTile], *rows[kTile];
    M::rows(queries, b.copies, x.at(p.q, row + first), p.q.time, count, p.K);
    M::rows(outputs, b.copies + kTile * p.K, x.at(dh, row + first), dh.time, count, p.V);
    M::product(queries, count, 0, p.K, b.keys_t + skipped * M::padded(p.K) * M::kStride, p.K,
               b.scores + skipped * count * M::kStride, count, end - begin, false);
    M::product(outputs, count, 0, p.V, b.values_t + skipped * M::padded(p.V) * M::kStride, p.V,
               b.grads + skipped * count * M::kStride, count, end - begin, false);
    if (b.state.any) {
      M::product(outputs, count, 0, p.V, b.state_t, p.V, b.from_state, count, p.K, false);
    }
    for (int64_t r = 0; r < count; ++r) {
      rows[r] = b.left + r * b.pitch;
      weigh(x, b, row, first + r, r, count, begin, end);
    }
    M::product(rows, count, begin, M::padded(end), b.keys, steps, b.dq, count, p.K, true);
    for (int64_t r = 0; r < count; ++r) {
      store_row(x.template out<IO>(p.dq, row + first + r, p.K), b.dq, count, r, p.K);
    }
    M::transpose_tile(b.left_t, kTile, b.scores, count, begin, end);
    M::transpose_tile(b.weights_t, kTile, b.grads, count, begin, end);
    for (int64_t j = begin; j < end; j += kTile) {
      const int64_t now = end - j < kTile ? end - j : kTile;
      for (int64_t i = 0; i < now; ++i) rows[i] = b.left_t + (j + i) * kTile;
      M::product(rows, now, 0, M::padded(count), b.queries + first * M::kStride, steps,
                 b.dk + j * M::kStride, steps, p.K, true);
      for (int64_t i = 0; i < now; ++i) rows[i] = b.weights_t + (j + i) * kTile;
      M::product(rows, now, 0, M::padded(count), b.outputs + first * M::kStride, steps,
                 b.dv + j * M::kStride, steps, p.V, true);
    }
  }

  // Recomputes row t of from_state from the unrounded C, not from its pairs of bf16.
  void unround(const Head<IO>& x, Buffers& b, int64_t row, int64_t t, int64_t r,
               int64_t count) const {
    for (int64_t k = 0; k < p.K; ++k) {
      b.from_state[M::at(count, r, k)] = dot(x.at(dh, row + t), b.state.C.data, p.K, k, p.V);
    }
  }

  // For row t: scores become dS, grads become the weights over the divisor, and dq becomes the part
  // that comes through the state.
  void weigh(const Head<IO>& x, Buffers& b, int64_t row, int64_t t, int64_t r, int64_t count,
             int64_t begin, int64_t end) const {
    const Gates<T>& g = b.gates;
    const IO* q = x.at(p.q, row + t);
    const T scale = T(query_scale(p));
    V total(0), squares(0), weighted(0);
    for (int64_t j = begin; j <= t; j += M::kWidth) {
      const int64_t at = M::at(count, r, j);
      const V decay = seen(g, t, j, pair_decay(g, t, j) * V(scale));
      const V weight = seen(g, t, j, decay * load(b.scores + at));
      store(b.decays + at, decay);
      total += weight, squares += weight * weight;
      weighted += seen(g, t, j, weight * load(b.grads + at));
    }
    const bool has_state = b.state.any && g.inflow[t] != 0;
    const T inflow = has_state ? g.inflow[t] * scale : T(0);
    const T q_n = has_state && p.normalized ? dot(q, b.state.n.data, p.K) : T(0);
    T q_state = has_state ? dot(q, b.from_state.data, count, r, p.K) : T(0);
    T inverse = 1, delta = 0;  // delta is the gradient of the denominator
    if (p.normalized) {
      const T denominator = sum(total) + inflow * q_n;
      if (M::kDepth > 1 && has_state) {
        const T spread = sum(squares) + inflow * inflow * dot_squares(q, b.state.n.data, p.K);
        if (denominator * denominator < T(kCancelled) * spread) {
          unround(x, b, row, t, r, count);
          q_state = dot(q, b.from_state.data, count, r, p.K);
        }
      }
      inverse = T(1) / divisor(denominator, g.floor[t], p.eps);
      const bool above = denominator < -g.floor[t] || denominator > g.floor[t];
      if (p.normalizer_grad && above) {
        delta = -(sum(weighted) + inflow * q_state) * inverse * inverse;
        if (denominator < 0) delta = -delta;
      }
    }
    Wide<T> pairs = widen(V(0));
    E* to = b.left + r * b.pitch;
    int64_t j = begin;
    for (; j <= t; j += M::kWidth) {
      const int64_t at = M::at(count, r, j);
      const V decay = load(b.decays + at);
      const V weight = seen(g, t, j, decay * load(b.scores + at));
      const V d_weight = seen(g, t, j, load(b.grads + at) * V(inverse) + V(delta));
      const V d_score = d_weight * decay, d_decay = d_weight * weight;
      store(b.scores + at, d_score);
      store(b.grads + at, weight * V(inverse));
      store_element(to + j, d_score);
      const Wide<T> flow = widen(d_decay);
      flow.add_to(b.out + j), pairs.add(flow);
    }
    for (; j < end; j += M::kWidth) {
      const int64_t at = M::at(count, r, j);
      store(b.scores + at, V(0));
      store(b.grads + at, V(0));
      store_element(to + j, V(0));
    }
    b.in[t] = pairs.total();
    b.state_in[t] = inflow * (inverse * q_state + delta * q_n);
    // Needed even if the state before is empty, which has a gradient too.
    b.weight[t] = g.inflow[t] * scale * inverse;
    b.n_weight[t] = g.inflow[t] * scale * delta;
    M::for_columns(p.K, [&](int64_t c, int, auto) __attribute__((always_inline)) {
      V value(0);
      if (has_state) {
        value = load(b.from_state + M::at(count, r, c)) * V(inflow * inverse) +
                load(b.state.n + c) * V(inflow * delta);
      }
      store(b.dq + M::at(count, r, c), value);
    });
  }

  // di is what flows out of step j, df what crosses step t.
  void gates(const Head<IO>& x, Buffers& b, int64_t row, int64_t steps) const {
    b.gates.slopes(p, row, x.head, steps);
    double before = b.through, after = 0, between = 0;
    for (int64_t t = 0; t < steps; ++t) b.crossing[t] = before, before += b.state_out[t];
    for (int64_t t = steps - 1; t >= 0; --t) {
      const bool held = p.hold && p.hold[row + t], reset = p.reset && p.reset[row + t];
      after += b.state_in[t], between += b.in[t] - b.out[t];
      if (reset) between = 0;
      const double out = b.out[t] + b.state_out[t], crossing = b.crossing[t] + after + between;
      *x.template out<T>(p.di, row + t, 1) = held ? T(0) : T(out * b.gates.log_i[t]);
      *x.template out<T>(p.df, row + t, 1) = held ? T(0) : T(crossing * b.gates.log_f[t]);
    }
  }

  FN static void scale_row(T* tile, int64_t rows, int64_t r, int64_t width, T scale, const T* add,
                           T add_scale) {
    M::for_columns(width, [&](int64_t c, int, auto) __attribute__((always_inline)) {
      T* at = tile + M::at(rows, r, c);
      V value = scale == 0 ? V(0) : load(at) * V(scale);
      if (add && add_scale != 0) value += load(add + c) * V(add_scale);
      store(at, value);
    });
  }

  FN static void store_row(IO* to, const T* tile, int64_t rows, int64_t r, int64_t width) {
    M::for_columns(width, [&](int64_t c, int lanes, auto whole) __attribute__((always_inline)) {
      store_part<decltype(whole)::value>(to + c, load(tile + M::at(rows, r, c)), lanes);
    });
  }
};

}  // namespace flashcell::FLASHCELL_ISA
