// The linear recurrences as elements of a scan: carry' = A carry + b, one map for each step. A walk
// (walk.cuh) and a scan (scan.cuh) run any of them. An element is one sequence and kN channels:
//   load(i)                         the words of step i, in the order of the walk
//   map(raw, i, mark, A, b)         the map of step i
//   advance(raw, i, mark, carry)    stores the step's results and takes the carry over it
//   begin, end, pad, sums           the first and last carry, unused rows, sums over the steps
#pragma once
#include "curve.cuh"
#include "sequence.cuh"

namespace flashcell::cuda {

struct Mark {  // what is asked of a step
  bool reset, hold;
};

// h_t = a_t h_{t-1} + b_t, a an n x n block of every channel.
template <typename IO, int kNOf, int n>
struct ScanForward {
  using Params = ScanForwardParams;
  using Word = cuda::Word<IO, kNOf * n>;
  static constexpr int kN = kNOf, kStates = n, kSums = 0, kRows = 2;
  static constexpr bool kMasked = false, kReverse = false;
  struct Raw {
    cuda::Word<IO, kN * n * n> a;
    Word b;
  };
  const Params& p;
  const bool stored;
  const int64_t s, d;
  const int steps, padding = 0;

  DEVICE ScanForward(const Params& params, int64_t row, int64_t channel)
      : p(params), stored(channel < params.D), s(row), d(stored ? channel : params.D - kN),
        steps(int(params.T)) {}

  DEVICE int64_t place(int i) const {  // of the n values of step i
    const int64_t t = p.reverse ? steps - 1 - i : i;
    return ((s * p.T + t) * p.D + d) * n;
  }
  DEVICE static bool has(int, int) { return true; }
  DEVICE const Word* at(int r, int i) const {  // n = 1 only
    return reinterpret_cast<const Word*>(static_cast<const IO*>(r == 0 ? p.a : p.b) + place(i));
  }
  DEVICE Raw load(int i) const {
    const int64_t from = place(i);
    return {*reinterpret_cast<const decltype(Raw::a)*>(static_cast<const IO*>(p.a) + from * n),
            *reinterpret_cast<const Word*>(static_cast<const IO*>(p.b) + from)};
  }
  DEVICE static Raw from_rows(const Word (&row)[2]) {
    if constexpr (n == 1) return {row[0], row[1]};
    return {};
  }
  DEVICE Mark mark(int) const { return {}; }

  DEVICE void map(const Raw& raw, int, Mark, float (&A)[kN][n][n], float (&b)[kN][n]) const {
#pragma unroll
    for (int c = 0; c < kN; ++c) {
#pragma unroll
      for (int j = 0; j < n; ++j) {
        b[c][j] = to_float(raw.b.value[c * n + j]);
#pragma unroll
        for (int k = 0; k < n; ++k) A[c][j][k] = to_float(raw.a.value[(c * n + j) * n + k]);
      }
    }
  }
  DEVICE void advance(const Raw& raw, int i, Mark, float (&carry)[kN][n]) {
    float out[kN * n];
#pragma unroll
    for (int c = 0; c < kN; ++c) {
#pragma unroll
      for (int j = 0; j < n; ++j) {
        float sum = to_float(raw.b.value[c * n + j]);
#pragma unroll
        for (int k = 0; k < n; ++k) {
          sum = fmaf(to_float(raw.a.value[(c * n + j) * n + k]), carry[c][k], sum);
        }
        out[c * n + j] = sum;
      }
    }
#pragma unroll
    for (int c = 0; c < kN * n; ++c) carry[c / n][c % n] = out[c];
    if (stored) *reinterpret_cast<Word*>(static_cast<IO*>(p.h) + place(i)) = narrow<IO>(out);
  }
  DEVICE void begin(float (&carry)[kN][n]) const {
    const float* from = static_cast<const float*>(p.h0) + (s * p.D + d) * n;
#pragma unroll
    for (int c = 0; c < kN * n; ++c) carry[c / n][c % n] = p.h0 == nullptr ? 0 : from[c];
  }
  DEVICE void end(const float (&)[kN][n]) const {}
  DEVICE void pad(int, int) const {}
};

// Its gradient. The carry is what a step hands to the one before it in the recurrence:
// carry' = a^T g with g = dh + carry = db, and da = g h_prev^T.
template <typename IO, int kNOf, int n>
struct ScanBackward {
  using Params = ScanBackwardParams;
  using Word = cuda::Word<IO, kNOf * n>;
  static constexpr int kN = kNOf, kStates = n, kSums = 0, kRows = 3;
  static constexpr bool kMasked = false, kReverse = true;
  struct Raw {
    cuda::Word<IO, kN * n * n> a;
    Word dh, h;
  };
  const Params& p;
  const bool stored;
  const int64_t s, d;
  const int steps, padding = 0;

  DEVICE ScanBackward(const Params& params, int64_t row, int64_t channel)
      : p(params), stored(channel < params.D), s(row), d(stored ? channel : params.D - kN),
        steps(int(params.T)) {}

  DEVICE int64_t place(int i) const {
    const int64_t t = p.reverse ? i : steps - 1 - i;
    return ((s * p.T + t) * p.D + d) * n;
  }
  DEVICE bool has(int r, int i) const { return r < 2 || i + 1 < steps; }
  DEVICE const Word* at(int r, int i) const {  // n = 1 only
    const void* of = r == 0 ? p.a : r == 1 ? p.dh : p.h;
    return reinterpret_cast<const Word*>(static_cast<const IO*>(of) + place(r == 2 ? i + 1 : i));
  }
  DEVICE Raw load(int i) const {
    const int64_t from = place(i);
    Raw raw{*reinterpret_cast<const decltype(Raw::a)*>(static_cast<const IO*>(p.a) + from * n),
            *reinterpret_cast<const Word*>(static_cast<const IO*>(p.dh) + from), {}};
    if (i + 1 < steps) {
      raw.h = *reinterpret_cast<const Word*>(static_cast<const IO*>(p.h) + place(i + 1));
    }
    return raw;
  }
  DEVICE static Raw from_rows(const Word (&row)[3]) {
    if constexpr (n == 1) return {row[0], row[1], row[2]};
    return {};
  }
  DEVICE Mark mark(int) const { return {}; }

  DEVICE void map(const Raw& raw, int, Mark, float (&A)[kN][n][n], float (&b)[kN][n]) const {
#pragma unroll
    for (int c = 0; c < kN; ++c) {
#pragma unroll
      for (int j = 0; j < n; ++j) {
        b[c][j] = 0;
#pragma unroll
        for (int k = 0; k < n; ++k) {
          A[c][j][k] = to_float(raw.a.value[(c * n + k) * n + j]);
          b[c][j] = fmaf(A[c][j][k], to_float(raw.dh.value[c * n + k]), b[c][j]);
        }
      }
    }
  }
  DEVICE void advance(const Raw& raw, int i, Mark, float (&carry)[kN][n]) {
    float g[kN * n], da[kN * n * n];
#pragma unroll
    for (int c = 0; c < kN; ++c) {
#pragma unroll
      for (int j = 0; j < n; ++j) {
        g[c * n + j] = to_float(raw.dh.value[c * n + j]) + carry[c][j];
        carry[c][j] = 0;
      }
#pragma unroll
      for (int j = 0; j < n; ++j) {
        float before = to_float(raw.h.value[c * n + j]);
        if (i + 1 == steps) {
          const float* h0 = static_cast<const float*>(p.h0);
          before = h0 == nullptr ? 0 : h0[(s * p.D + d + c) * n + j];
        }
#pragma unroll
        for (int k = 0; k < n; ++k) {
          const float a = to_float(raw.a.value[(c * n + k) * n + j]);
          carry[c][j] = fmaf(a, g[c * n + k], carry[c][j]);
          da[(c * n + k) * n + j] = g[c * n + k] * before;
        }
      }
    }
    if (!stored) return;
    const int64_t to = place(i);
    *reinterpret_cast<Word*>(static_cast<IO*>(p.db) + to) = narrow<IO>(g);
    *reinterpret_cast<decltype(Raw::a)*>(static_cast<IO*>(p.da) + to * n) = narrow<IO>(da);
  }
  DEVICE void begin(float (&carry)[kN][n]) const {
#pragma unroll
    for (int c = 0; c < kN * n; ++c) carry[c / n][c % n] = 0;
  }
  DEVICE void end(const float (&carry)[kN][n]) const {
    float* to = static_cast<float*>(p.dh0) + (s * p.D + d) * n;
#pragma unroll
    for (int c = 0; c < kN * n; ++c) {
      if (stored) to[c] = carry[c / n][c % n];
    }
  }
  DEVICE void pad(int, int) const {}
};

}  // namespace flashcell::cuda
