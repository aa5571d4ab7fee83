// The backward of a cell as an element of a linear scan (linear.cuh): the carry is the gradient of
// the states, its map the transposed Jacobian of the step. Gates are computed again from x and the
// saved states, by the cell's own equations.
#pragma once
#include "linear.cuh"

namespace flashcell::cuda {

template <typename Cell, typename IO, int kNOf, bool kMaskedOf>
struct Adjoint {
  using Params = BackwardParams;
  using Word = cuda::Word<IO, kNOf>;
  using V = Real<kIsCoarse<IO>>;
  static constexpr int kN = kNOf, kStates = Cell::kStates, kGates = Cell::kGates;
  static constexpr int kSums = Cell::kWeights, kRows = kGates + kStates + 1;
  static constexpr bool kMasked = kMaskedOf, kReverse = true;
  struct Raw {
    Word row[kRows];  // x, the states before the step, dh
  };
  const Params& p;
  const Column column;
  const bool stored;
  const int64_t d;
  const int steps, padding;
  const IO *x, *dh, *kept[kStates];
  int kept_stride[kStates];
  float weight[kN][kSums], sums[kN][kSums] = {};

  DEVICE Adjoint(const Params& params, int64_t s, int64_t channel)
      : p(params), column(params, s), stored(channel < params.D),
        d(stored ? channel : params.D - kN), steps(column.length), padding(column.padding) {
    x = static_cast<const IO*>(p.x) + column.x_offset + d;
    dh = static_cast<const IO*>(p.dh) + column.row * p.D + d;
    // After a step, h holds state 0 unless the step was held; saved holds the others, then state 0.
    const IO* saved = static_cast<const IO*>(p.saved) + column.row * p.V * p.D + d;
#pragma unroll
    for (int k = 0; k < kStates; ++k) {
      const bool in_h = k == 0 && !(kMasked && p.V == kStates);
      kept[k] = in_h ? static_cast<const IO*>(p.h) + column.row * p.D + d
                     : saved + (k == 0 ? kStates - 1 : k - 1) * p.D;
      kept_stride[k] = int(in_h ? p.D : p.V * p.D);
    }
#pragma unroll
    for (int c = 0; c < kN; ++c) {
#pragma unroll
      for (int q = 0; q < kSums; ++q) {
        weight[c][q] = static_cast<const float*>(p.weight)[q * p.D + d + c];
      }
    }
  }

  DEVICE int time(int i) const { return steps - 1 - i; }
  DEVICE bool has(int r, int i) const {
    return r < kGates || r == kRows - 1 || i + 1 < steps;
  }
  DEVICE const Word* at(int r, int i) const {
    const int t = time(i);
    const IO* from = r < kGates      ? x + int64_t(t) * int(p.x_time) + r * p.x_gate
                     : r < kRows - 1 ? kept[r - kGates] + int64_t(t - 1) * kept_stride[r - kGates]
                                     : dh + int64_t(t) * int(p.D);
    return reinterpret_cast<const Word*>(from);
  }
  DEVICE Raw load(int i) const {
    Raw raw;
#pragma unroll
    for (int r = 0; r < kRows; ++r) raw.row[r] = has(r, i) ? *at(r, i) : Word{};
    return raw;
  }
  DEVICE static Raw from_rows(const Word (&row)[kRows]) {
    Raw raw;
#pragma unroll
    for (int r = 0; r < kRows; ++r) raw.row[r] = row[r];
    return raw;
  }
  DEVICE Mark mark(int i) const {
    if (!kMasked) return {};
    const int64_t at = column.row + time(i);
    return {p.reset != nullptr && p.reset[at], p.hold != nullptr && p.hold[at]};
  }

  struct Step {
    V x[kGates], w[kSums], s[kStates];
  };
  DEVICE Step step(const Raw& raw, int i, Mark mark, int c) const {
    Step step;
#pragma unroll
    for (int g = 0; g < kGates; ++g) step.x[g] = to_float(raw.row[g].value[c]);
#pragma unroll
    for (int q = 0; q < kSums; ++q) step.w[q] = weight[c][q];
#pragma unroll
    for (int k = 0; k < kStates; ++k) {
      float before = to_float(raw.row[kGates + k].value[c]);
      if (i + 1 == steps) {
        const float* initial = static_cast<const float*>(p.initial);
        before = initial == nullptr ? 0 : initial[place(k) + c];
      }
      if (mark.reset) before = 0;
      step.s[k] = before;
    }
    return step;
  }

  DEVICE void map(const Raw& raw, int i, Mark mark, float (&A)[kN][kStates][kStates],
                  float (&b)[kN][kStates]) const {
#pragma unroll
    for (int c = 0; c < kN; ++c) {
      const Step at = step(raw, i, mark, c);
      V next[kStates], slope[kStates][kStates];
      Cell::jacobian(at.x, at.w, at.s, next, slope);
      const float dh = to_float(raw.row[kRows - 1].value[c]);
#pragma unroll
      for (int j = 0; j < kStates; ++j) {
#pragma unroll
        for (int k = 0; k < kStates; ++k) {
          A[c][j][k] = mark.reset ? 0 : mark.hold ? float(j == k) : slope[k][j].v;
        }
        b[c][j] = mark.hold || mark.reset ? 0 : slope[0][j].v * dh;
      }
    }
  }

  DEVICE void advance(const Raw& raw, int i, Mark mark, float (&carry)[kN][kStates]) {
    float out[kGates][kN];
#pragma unroll
    for (int c = 0; c < kN; ++c) {
      const Step at = step(raw, i, mark, c);
      V d[kStates], dx[kGates], dw[kSums];
#pragma unroll
      for (int k = 0; k < kStates; ++k) d[k] = carry[c][k];
#pragma unroll
      for (int q = 0; q < kSums; ++q) dw[q] = sums[c][q];
      d[0] += V(to_float(raw.row[kRows - 1].value[c]));
      Cell::backward(at.x, at.w, at.s, d, dx, dw);
#pragma unroll
      for (int g = 0; g < kGates; ++g) out[g][c] = mark.hold ? 0 : dx[g].v;
      if (!mark.hold) {
#pragma unroll
        for (int k = 0; k < kStates; ++k) carry[c][k] = d[k].v;
#pragma unroll
        for (int q = 0; q < kSums; ++q) sums[c][q] = dw[q].v;
      }
      if (mark.reset) {
#pragma unroll
        for (int k = 0; k < kStates; ++k) carry[c][k] = 0;
      }
    }
    if (!stored) return;
    IO* to = static_cast<IO*>(p.dx) + (column.row + time(i)) * kGates * p.D + d;
#pragma unroll
    for (int g = 0; g < kGates; ++g) {
      *reinterpret_cast<Word*>(to + g * p.D) = narrow<IO>(out[g]);
    }
  }

  DEVICE int64_t place(int k) const { return (k * p.S + column.index) * p.D + d; }
  DEVICE void begin(float (&carry)[kN][kStates]) const {
    const float* dlast = static_cast<const float*>(p.dlast);
#pragma unroll
    for (int c = 0; c < kN * kStates; ++c) {
      carry[c / kStates][c % kStates] =
          dlast == nullptr ? 0 : dlast[place(c % kStates) + c / kStates];
    }
  }
  DEVICE void end(const float (&carry)[kN][kStates]) const {
    if (!stored) return;
#pragma unroll
    for (int c = 0; c < kN * kStates; ++c) {
      static_cast<float*>(p.dstate)[place(c % kStates) + c / kStates] =
          carry[c / kStates][c % kStates];
    }
  }
  // dx of the rows past the end, [begin, end).
  DEVICE void pad(int begin, int end) const {
    for (int t = begin; stored && t < end; ++t) {
      IO* to = static_cast<IO*>(p.dx) + (column.row + t) * kGates * p.D + d;
#pragma unroll
      for (int g = 0; g < kGates; ++g) *reinterpret_cast<Word*>(to + g * p.D) = Word{};
    }
  }
};

}  // namespace flashcell::cuda
