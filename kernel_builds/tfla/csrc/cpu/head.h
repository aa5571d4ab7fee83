// The unit of work of one thread: one head of one sequence, chunk by chunk, with the state carried
// between chunks.
#pragma once
#include "gates.h"
#include "matrix.h"

namespace flashcell::FLASHCELL_ISA {

template <typename IO>
struct Head {
  using T = State<IO>;
  const MlstmParams& p;
  const Sequence& s;
  int64_t head;

  int64_t chunks() const { return (s.length + p.chunk - 1) / p.chunk; }
  int64_t row(int64_t chunk) const { return s.row + chunk * p.chunk; }
  int64_t steps(int64_t chunk) const {
    const int64_t left = s.length - chunk * p.chunk;
    return left < p.chunk ? left : p.chunk;
  }
  const IO* at(const Strided& x, int64_t row) const {
    return (const IO*)x.data + row / p.T * x.batch + row % p.T * x.time + head * x.head;
  }
  // Returns row `row` of a contiguous [B, T, H, width] or [B, T, H].
  template <typename X>
  X* out(void* x, int64_t row, int64_t width) const {
    return (X*)x + (row * p.H + head) * width;
  }
  // Returns this sequence's and head's part of a state, which has `size` values each.
  const T* part(const void* x, int64_t size) const {
    return (const T*)x + (s.index * p.H + head) * size;
  }
  T* part(void* x, int64_t size) const { return (T*)x + (s.index * p.H + head) * size; }
};

// The carried state: C as a tile [panels of V][K][kStride], and n; m is in Gates.
template <typename IO>
struct Carry {
  using M = Matrix<IO>;
  using T = State<IO>;
  using V = Vec<T>;

  int64_t K, width;
  Scratch<T> C, n;
  bool any;  // whether the state may be non-zero; if false it is all zero and need not be read

  Carry(const Host& host, int64_t k, int64_t v)
      : K(k), width(v), C(host, M::tile_size(k, v)), n(host, k + M::kWidth), any(false) {}

  int64_t size() const { return M::tile_size(K, width); }

  void clear() {
    memset(C, 0, size() * sizeof(T));
    memset(n, 0, (K + M::kWidth) * sizeof(T));
    any = false;
  }

  // Loads from, and stores to, [K, V] and [K]; null stands for zero.
  void load_from(const T* from_C, const T* from_n) {
    clear();
    if (from_C) {
      any = true;
      for (int64_t k = 0; k < K; ++k) {
        for (int64_t c = 0; c < width; c += M::kStride) {
          const int64_t count = width - c < M::kStride ? width - c : M::kStride;
          memcpy(C + M::at(K, k, c), from_C + k * width + c, count * sizeof(T));
        }
      }
    }
    if (from_n) any = true, memcpy(n, from_n, K * sizeof(T));
  }
  void store_to(T* to_C, T* to_n) const {
    for (int64_t k = 0; k < K; ++k) {
      for (int64_t c = 0; c < width; c += M::kStride) {
        const int64_t count = width - c < M::kStride ? width - c : M::kStride;
        memcpy(to_C + k * width + c, C + M::at(K, k, c), count * sizeof(T));
      }
    }
    if (to_n) memcpy(to_n, n, K * sizeof(T));
  }
  void scale(T factor) {
    if (factor == T(0)) return clear();  // clears even NaN
    if (!any || factor == T(1)) return;
    for (int64_t i = 0; i < size(); i += M::kWidth) store(C + i, load(C + i) * V(factor));
    for (int64_t i = 0; i < K; i += M::kWidth) store(n + i, load(n + i) * V(factor));
  }

  T dot(const Carry& other) const {  // returns <C, C'> + <n, n'>
    V total(0);
    for (int64_t i = 0; i < size(); i += M::kWidth) total += load(C + i) * load(other.C + i);
    for (int64_t i = 0; i < K; i += M::kWidth) total += load(n + i) * load(other.n + i);
    return sum(total);
  }

  // C = keep C + rows^T packed, with rows scaled by `weight`; n = keep n + rows scaled by
  // `n_weight`, or unchanged if `n_weight` is null (the cell has no n).
  void update(T keep, const IO* rows, int64_t stride, const T* weight, const T* n_weight,
              int64_t count, const Element<IO>* packed, Element<IO>* transposed, int64_t pitch) {
    if (!any && keep == keep) keep = 0;  // a NaN must reach even an empty state
    M::transpose_rows(transposed, pitch, rows, stride, weight, count, K);
    M::product(transposed, pitch, K, packed, count, C, width, keep);
    if (n_weight) M::add_rows(n, rows, stride, n_weight, count, K, keep);
    any = true;
  }
};

// Saved states at the starts of chunks.
template <typename IO>
struct Snapshots {
  using T = State<IO>;
  struct About {
    double m;
    bool any;
  };

  int64_t pitch;
  Scratch<T> states;
  Scratch<About> about;

  Snapshots(const Host& host, int64_t count, const Carry<IO>& like)
      : pitch(bytes(like) / sizeof(T)), states(host, count * pitch), about(host, count) {}

  static int64_t bytes(const Carry<IO>& like) {
    return (like.size() + like.K + Matrix<IO>::kWidth) * sizeof(T);
  }
  void save(int64_t i, const Carry<IO>& carry, double m) {
    memcpy(states + i * pitch, carry.C, carry.size() * sizeof(T));
    memcpy(states + i * pitch + carry.size(), carry.n, bytes(carry) - carry.size() * sizeof(T));
    about[i] = {m, carry.any};
  }
  double load(int64_t i, Carry<IO>& carry) const {
    memcpy(carry.C, states + i * pitch, carry.size() * sizeof(T));
    memcpy(carry.n, states + i * pitch + carry.size(), bytes(carry) - carry.size() * sizeof(T));
    carry.any = about[i].any;
    return about[i].m;
  }
};

// Product of a row with row r of a tile, or with a vector, over `width` columns.
template <typename IO>
FN State<IO> dot(const IO* row, const State<IO>* tile, int64_t rows, int64_t r, int64_t width) {
  using M = Matrix<IO>;
  typename M::V total(0);
  M::for_columns(width, [&](int64_t c, int lanes, auto whole) __attribute__((always_inline)) {
    total += load_part<decltype(whole)::value>(row + c, lanes) * load(tile + M::at(rows, r, c));
  });
  return sum(total);
}
template <typename IO>
FN State<IO> dot(const IO* row, const State<IO>* values, int64_t width) {
  using M = Matrix<IO>;
  typename M::V total(0);
  M::for_columns(width, [&](int64_t c, int lanes, auto whole) __attribute__((always_inline)) {
    total += load_part<decltype(whole)::value>(row + c, lanes) * load(values + c);
  });
  return sum(total);
}
// Sum of the squared terms of that product: its size if the terms had random signs.
template <typename IO>
FN State<IO> dot_squares(const IO* row, const State<IO>* values, int64_t width) {
  using M = Matrix<IO>;
  typename M::V total(0);
  M::for_columns(width, [&](int64_t c, int lanes, auto whole) __attribute__((always_inline)) {
    const auto term = load_part<decltype(whole)::value>(row + c, lanes) * load(values + c);
    total += term * term;
  });
  return sum(total);
}

// Returns e^(u_t + w_j) for one vector of j.
template <typename T>
FN Vec<T> pair_decay(const Gates<T>& g, int64_t t, int64_t j) {
  return exp((load(g.w_whole + j) + Vec<T>(g.u_whole[t])) +
             (load(g.w_rest + j) + Vec<T>(g.u_rest[t])));
}

// Sets the lanes of j outside [start, t] to 0, whatever x holds there.
template <typename T>
FN Vec<T> seen(const Gates<T>& g, int64_t t, int64_t j, Vec<T> x) {
  using V = Vec<T>;
  if (g.start[t] <= j && j + V::kWidth <= t + 1) return x;
  T steps[V::kWidth];
  for (int lane = 0; lane < V::kWidth; ++lane) steps[lane] = T(j + lane);
  const V at = load(steps);
  return select(at < V(T(g.start[t])), V(0), select(V(T(t)) < at, V(0), x));
}

// Returns the divisor of h.
template <typename T>
FN T divisor(T denominator, T floor, double eps) {
  const T size = denominator < 0 ? -denominator : denominator;
  return (size < floor ? floor : size) + T(eps);
}

FN double query_scale(const MlstmParams& p) { return 1 / __builtin_sqrt(double(p.K)); }

template <typename IO>
int64_t multiply_adds(const MlstmParams& p) {
  int64_t steps = 0;
  for (int64_t s = 0; s < p.S; ++s) steps += p.sequences[s].length;
  return steps * p.H * (2 * p.K * p.V + p.chunk / 2 * (p.K + p.V));
}

// Limits the chunk length to the longest sequence.
template <typename Params>
FN Params fit_chunk(Params p) {
  int64_t longest = 1;
  for (int64_t s = 0; s < p.S; ++s) {
    if (p.sequences[s].length > longest) longest = p.sequences[s].length;
  }
  if (p.chunk > longest) p.chunk = longest;
  return p;
}

// Visits sequences longest first, with all heads of a sequence in different shares, so that equal
// shares take about equal time.
template <typename Body>
FN void for_heads(const MlstmParams& p, int64_t begin, int64_t end, const Body& body) {
  for (int64_t i = begin; i < end; ++i) body(p.sequences[i % p.S], i / p.S);
}

}  // namespace flashcell::FLASHCELL_ISA
