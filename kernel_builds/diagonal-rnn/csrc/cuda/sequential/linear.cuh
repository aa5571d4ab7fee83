// The linear recurrences as elements of a scan: carry' = A carry + b, with one such map for each
// step. A sequential pass (kernels.cuh) or a scan (scan/single_pass.cuh) can run any of them. An
// element is one sequence and kN channels, with these members:
//   first(r), bytes(r)              address of row r of step 0, and bytes to the next step's
//   needs(r, i)                     whether step i has row r
//   kOnce                           rows from here on are read once per group of steps, if any
//   advance_group(raw, i, n, carry) advances over n such steps together
//   map(raw, i, mark, A, b)         the map of step i, from its rows
//   advance(raw, i, mark, carry)    stores the step's results and takes the carry over it
//   begin, end, pad, sums           first and last carry, unused rows, sums over the steps
// Steps are numbered in the order in which the recurrence runs. A thread past the last channel
// repeats the last channel's work.
#pragma once
#include "../curve.cuh"
#include "../sequence.cuh"

namespace flashcell::cuda {

// Replaces carry by A carry + b.
template <int K>
DEVICE void apply(const float (&A)[K][K], const float (&b)[K], float (&carry)[K]) {
  float next[K];
#pragma unroll
  for (int i = 0; i < K; ++i) {
    next[i] = b[i];
#pragma unroll
    for (int j = 0; j < K; ++j) next[i] = fmaf(A[i][j], carry[j], next[i]);
  }
#pragma unroll
  for (int i = 0; i < K; ++i) carry[i] = next[i];
}

// Replaces (A, b) by the map that applies (A, b) first and (A2, b2) second.
template <int K>
DEVICE void compose(const float (&A2)[K][K], const float (&b2)[K], float (&A)[K][K],
                    float (&b)[K]) {
#pragma unroll
  for (int j = 0; j < K; ++j) {
    float column[K];
#pragma unroll
    for (int i = 0; i < K; ++i) {
      column[i] = 0;
#pragma unroll
      for (int k = 0; k < K; ++k) column[i] = fmaf(A2[i][k], A[k][j], column[i]);
    }
#pragma unroll
    for (int i = 0; i < K; ++i) A[i][j] = column[i];
  }
  apply(A2, b2, b);
}

// Sets (A, b) to the identity map.
template <int K>
DEVICE void identity(float (&A)[K][K], float (&b)[K]) {
#pragma unroll
  for (int i = 0; i < K; ++i) {
    b[i] = 0;
#pragma unroll
    for (int j = 0; j < K; ++j) A[i][j] = i == j;
  }
}

struct Mark {  // the masks of a step
  bool reset, hold;
};

// The parts that h_t = a_t h_{t-1} + b_t and its gradient share; a is an n x n block for every
// channel. A word is a row of the block, or (n = 1) neighbouring scalars.
template <typename ParamsOf, typename IOOf, int kNOf, int n>
struct BlockScan {
  using Params = ParamsOf;
  using IO = IOOf;
  using Word = cuda::Word<IO, kNOf * n>;
  static constexpr int kN = kNOf, kStates = n, kSums = 0;
  static constexpr bool kMasked = false;
  static_assert(n == 1 || kN == 1);

  const Params* p;
  int64_t d, row;  // the first channel, and the sequence's first row, counted in channels
  int steps, padding = 0;
  int step;  // bytes from a step's row to the next step's; negative if time runs backwards

  DEVICE BlockScan(const Params& params, int64_t s, int64_t channel, bool reversed)
      : p(&params),
        d(channel < params.D ? channel : params.D - kN),
        row(s * params.D + d),
        steps(int(params.T)),
        step(int(params.D) * n * int(sizeof(IO)) * (reversed ? -1 : 1)) {
    first_place = (s * params.T + (reversed && steps > 0 ? steps - 1 : 0)) * params.D + d;
  }
  int64_t first_place;  // offset of step 0, in channels

  // Returns the address of step i's row. Both factors of the multiplication have 32 bits, which the
  // compiler knows only when they are widened here.
  DEVICE IO* values(const void* of, int i) const {
    const char* first = static_cast<const char*>(of) + first_place * n * int64_t(sizeof(IO));
    return reinterpret_cast<IO*>(const_cast<char*>(first) + int64_t(i) * step);
  }
  DEVICE IO* block_row(const void* of, int r, int i = 0) const {
    const char* first = static_cast<const char*>(of) + first_place * n * n * int64_t(sizeof(IO));
    return reinterpret_cast<IO*>(const_cast<char*>(first) + int64_t(i) * bytes_of(true)) + r * n;
  }
  DEVICE int bytes_of(bool block) const { return step * (block ? n : 1); }
  DEVICE float initial(const void* h0, int c) const {
    return h0 == nullptr ? 0 : static_cast<const float*>(h0)[row * n + c];
  }
  DEVICE Mark mark(int) const { return {}; }
  DEVICE void pad(int, int) const {}
};

template <typename IO, int kNOf, int n>
struct ScanForward : BlockScan<ScanForwardParams, IO, kNOf, n> {
  using Base = BlockScan<ScanForwardParams, IO, kNOf, n>;
  using Base::kN, Base::p;
  using typename Base::Params, typename Base::Word;
  static constexpr int kRows = n + 1, kOnce = kRows;  // rows of a, then b
  static constexpr bool kIsForward = true;
  using Raw = Word[kRows];

  DEVICE ScanForward(const Params& params, int64_t s, int64_t channel)
      : Base(params, s, channel, params.reverse) {}
  DEVICE const void* first(int r) const {
    return r < n ? this->block_row(p->a, r) : this->values(p->b, 0);
  }
  DEVICE int bytes(int r) const { return this->bytes_of(r < n); }
  DEVICE bool needs(int, int) const { return true; }

  DEVICE void map(const Raw& raw, int, Mark, float (&A)[kN][n][n], float (&b)[kN][n]) const {
#pragma unroll
    for (int c = 0; c < kN; ++c) {
#pragma unroll
      for (int j = 0; j < n; ++j) {
        b[c][j] = to_float(raw[n].value[c * n + j]);
#pragma unroll
        for (int k = 0; k < n; ++k) A[c][j][k] = to_float(raw[j].value[c * n + k]);
      }
    }
  }
  DEVICE void advance(const Raw& raw, int i, Mark mark, float (&carry)[kN][n]) {
    float A[kN][n][n], b[kN][n], out[kN * n];
    map(raw, i, mark, A, b);
#pragma unroll
    for (int c = 0; c < kN; ++c) {
#pragma unroll
      for (int j = 0; j < n; ++j) {
        float sum = b[c][j];
#pragma unroll
        for (int k = 0; k < n; ++k) sum = fmaf(A[c][j][k], carry[c][k], sum);
        out[c * n + j] = sum;
      }
    }
#pragma unroll
    for (int c = 0; c < kN * n; ++c) carry[c / n][c % n] = out[c];
    store_away(this->values(p->h, i), narrow<IO>(out));
  }
  DEVICE void begin(float (&carry)[kN][n]) const {
#pragma unroll
    for (int c = 0; c < kN * n; ++c) carry[c / n][c % n] = this->initial(p->h0, c);
  }
  DEVICE void end(const float (&)[kN][n]) const {}
};

// The gradient. The carry is what a step passes to the step before it in the recurrence: carry' =
// a^T g with g = dh + carry = db, and da = g h_prev^T.
template <typename IO, int kNOf, int n>
struct ScanBackward : BlockScan<ScanBackwardParams, IO, kNOf, n> {
  using Base = BlockScan<ScanBackwardParams, IO, kNOf, n>;
  using Base::kN, Base::p, Base::steps;
  using typename Base::Params, typename Base::Word;
  // Rows of a, then dh, then h of the step before.
  static constexpr int kRows = n + 2, kOnce = kRows;
  static constexpr bool kIsForward = false;
  using Raw = Word[kRows];

  DEVICE ScanBackward(const Params& params, int64_t s, int64_t channel)
      : Base(params, s, channel, !params.reverse) {}
  DEVICE const void* first(int r) const {
    return r < n    ? this->block_row(p->a, r)
           : r == n ? this->values(p->dh, 0)
                    : this->values(p->h, 1);
  }
  DEVICE int bytes(int r) const { return this->bytes_of(r < n); }
  DEVICE bool needs(int r, int i) const { return r <= n || i + 1 < steps; }

  DEVICE void map(const Raw& raw, int, Mark, float (&A)[kN][n][n], float (&b)[kN][n]) const {
#pragma unroll
    for (int c = 0; c < kN; ++c) {
#pragma unroll
      for (int j = 0; j < n; ++j) {
        b[c][j] = 0;
#pragma unroll
        for (int k = 0; k < n; ++k) {
          A[c][j][k] = to_float(raw[k].value[c * n + j]);
          b[c][j] = fmaf(A[c][j][k], to_float(raw[n].value[c * n + k]), b[c][j]);
        }
      }
    }
  }
  DEVICE void advance(const Raw& raw, int i, Mark, float (&carry)[kN][n]) {
    float g[kN * n], da[n][kN * n];
#pragma unroll
    for (int c = 0; c < kN * n; ++c) {
      g[c] = to_float(raw[n].value[c]) + carry[c / n][c % n];
      carry[c / n][c % n] = 0;
    }
#pragma unroll
    for (int c = 0; c < kN * n; ++c) {
      const float h = to_float(raw[n + 1].value[c]);
      const float before = i + 1 == steps ? this->initial(p->h0, c) : h;
#pragma unroll
      for (int k = 0; k < n; ++k) {
        const float g_k = g[c / n * n + k];
        carry[c / n][c % n] = fmaf(to_float(raw[k].value[c]), g_k, carry[c / n][c % n]);
        da[k][c] = g_k * before;
      }
    }
    store_away(this->values(p->db, i), narrow<IO>(g));
#pragma unroll
    for (int k = 0; k < n; ++k) store_away(this->block_row(p->da, k, i), narrow<IO>(da[k]));
  }
  DEVICE void begin(float (&carry)[kN][n]) const {
#pragma unroll
    for (int c = 0; c < kN * n; ++c) carry[c / n][c % n] = 0;
  }
  DEVICE void end(const float (&carry)[kN][n]) const {
#pragma unroll
    for (int c = 0; c < kN * n; ++c) {
      static_cast<float*>(p->dh0)[this->row * n + c] = carry[c / n][c % n];
    }
  }
};

}  // namespace flashcell::cuda
