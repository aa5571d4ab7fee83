// The backward of a cell as an element of a linear scan (linear.cuh): the carry is the gradient of
// the states, its map the transposed Jacobian of the step. Gates are computed again from x and the
// saved states, by the cell's own equations.
#pragma once
#include "linear.cuh"

namespace flashcell::cuda {

template <typename Cell, typename IOOf, int kNOf, bool kMaskedOf>
struct Adjoint {
  using Params = BackwardParams;
  using IO = IOOf;
  using Word = cuda::Word<IO, kNOf>;
  using V = Real<kIsCoarse<IO>>;
  static constexpr int kN = kNOf, kStates = Cell::kStates, kGates = Cell::kGates;
  static constexpr int kWeights = Cell::kWeights, kRows = kGates + kStates + 1;
  static constexpr int kSums = kWeights + kGates;  // the gradients of the weight, then of a bias
  static constexpr bool kMasked = kMaskedOf;
  using Raw = Word[kRows];  // x, the states before the step, dh

  const Params* p;
  int64_t index, row, x_row, d;
  int steps, padding;
  IO* dx;  // of the first step
  float weight[kN][kWeights], bias[kN][kGates], sums[kN][kSums];

  DEVICE Adjoint(const Params& params, int64_t s, int64_t channel)
      : p(&params), d(channel < params.D ? channel : params.D - kN) {
    const Column column(params, s);
    index = column.index, row = column.row, x_row = column.x_offset + to_head(params, d);
    steps = column.length, padding = column.padding;
#pragma unroll
    for (int c = 0; c < kN; ++c) {
#pragma unroll
      for (int q = 0; q < kWeights; ++q) {
        weight[c][q] = static_cast<const float*>(params.weight)[q * params.D + d + c];
      }
#pragma unroll
      for (int q = 0; q < kSums; ++q) sums[c][q] = 0;
    }
    load_bias(params, d, bias);
    const int64_t head = int(d) / int(p->J) * (p->dx_head - p->J);
    dx = static_cast<IO*>(p->dx) + head + row * kGates * p->J + d;
  }

  // Rows of the sums that are wanted.
  static int64_t sum_rows(const Params& p) { return p.bias == nullptr ? kWeights : kSums; }

  DEVICE int time(int i) const { return steps - 1 - i; }
  // After a step, h holds state 0 unless the step was held; saved holds the others, then state 0.
  DEVICE bool in_h(int k) const { return k == 0 && !(kMasked && p->V == kStates); }
  DEVICE const void* first(int r) const {
    const int64_t t = time(0);
    const int k = r - kGates;
    if (r < kGates) return static_cast<const IO*>(p->x) + x_row + t * p->x_time + r * p->x_gate + d;
    if (r == kRows - 1) return static_cast<const IO*>(p->dh) + (row + t) * p->D + d;
    if (in_h(k)) return static_cast<const IO*>(p->h) + (row + t - 1) * p->D + d;
    const int v = k == 0 ? kStates - 1 : k - 1;
    return static_cast<const IO*>(p->saved) + ((row + t - 1) * p->V + v) * p->D + d;
  }
  DEVICE int bytes(int r) const {
    const int elements = r < kGates                           ? int(p->x_time)
                         : r == kRows - 1 || in_h(r - kGates) ? int(p->D)
                                                              : int(p->V) * int(p->D);
    return -elements * int(sizeof(IO));
  }
  DEVICE bool needs(int r, int i) const { return r < kGates || r == kRows - 1 || i + 1 < steps; }
  DEVICE Mark mark(int i) const {
    if (!kMasked) return {};
    const int64_t at = row + time(i);
    return {p->reset != nullptr && p->reset[at], p->hold != nullptr && p->hold[at]};
  }

  struct Step {
    V x[kGates], w[kWeights], s[kStates];
  };
  DEVICE Step step(const float (&rows)[kRows][kN], int i, Mark mark, int c) const {
    Step step;
#pragma unroll
    for (int g = 0; g < kGates; ++g) step.x[g] = rows[g][c] + bias[c][g];
#pragma unroll
    for (int q = 0; q < kWeights; ++q) step.w[q] = weight[c][q];
#pragma unroll
    for (int k = 0; k < kStates; ++k) {
      float before = rows[kGates + k][c];
      if (i + 1 == steps) {
        const float* initial = static_cast<const float*>(p->initial);
        before = initial == nullptr ? 0 : initial[place(k) + c];
      }
      step.s[k] = mark.reset ? 0 : before;
    }
    return step;
  }

  DEVICE void map(const Raw& raw, int i, Mark mark, float (&A)[kN][kStates][kStates],
                  float (&b)[kN][kStates]) const {
    float rows[kRows][kN];
#pragma unroll
    for (int r = 0; r < kRows; ++r) widen(raw[r], rows[r]);
#pragma unroll
    for (int c = 0; c < kN; ++c) {
      const Step at = step(rows, i, mark, c);
      V next[kStates], slope[kStates][kStates];
      Cell::jacobian(at.x, at.w, at.s, next, slope);
      const float dh = rows[kRows - 1][c];
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
    float rows[kRows][kN], out[kGates][kN];
#pragma unroll
    for (int r = 0; r < kRows; ++r) widen(raw[r], rows[r]);
#pragma unroll
    for (int c = 0; c < kN; ++c) {
      const Step at = step(rows, i, mark, c);
      V d_state[kStates], dx[kGates], dw[kWeights];
#pragma unroll
      for (int k = 0; k < kStates; ++k) d_state[k] = carry[c][k];
#pragma unroll
      for (int q = 0; q < kWeights; ++q) dw[q] = sums[c][q];
      d_state[0] += V(rows[kRows - 1][c]);
      Cell::backward(at.x, at.w, at.s, d_state, dx, dw);
#pragma unroll
      for (int g = 0; g < kGates; ++g) out[g][c] = mark.hold ? 0 : dx[g].v;
      if (!mark.hold) {
#pragma unroll
        for (int k = 0; k < kStates; ++k) carry[c][k] = d_state[k].v;
#pragma unroll
        for (int q = 0; q < kWeights; ++q) sums[c][q] = dw[q].v;
#pragma unroll
        for (int g = 0; g < kGates; ++g) sums[c][kWeights + g] += dx[g].v;
      }
      if (mark.reset) {
#pragma unroll
        for (int k = 0; k < kStates; ++k) carry[c][k] = 0;
      }
    }
    IO* to = dx_row(time(i));
#pragma unroll
    for (int g = 0; g < kGates; ++g) store_away(to + g * p->J, narrow<IO>(out[g]));
  }

  DEVICE IO* dx_row(int t) const { return dx + int64_t(t) * (kGates * int(p->J)); }
  DEVICE int64_t place(int k) const { return (k * p->S + index) * p->D + d; }
  DEVICE void begin(float (&carry)[kN][kStates]) const {
    const float* dlast = static_cast<const float*>(p->dlast);
#pragma unroll
    for (int c = 0; c < kN * kStates; ++c) {
      carry[c / kStates][c % kStates] =
          dlast == nullptr ? 0 : dlast[place(c % kStates) + c / kStates];
    }
  }
  DEVICE void end(const float (&carry)[kN][kStates]) const {
#pragma unroll
    for (int c = 0; c < kN * kStates; ++c) {
      static_cast<float*>(p->dstate)[place(c % kStates) + c / kStates] =
          carry[c / kStates][c % kStates];
    }
  }
  // dx of the rows past the end, [begin, end).
  DEVICE void pad(int begin, int end) const {
    for (int t = begin; t < end; ++t) {
#pragma unroll
      for (int g = 0; g < kGates; ++g) *reinterpret_cast<Word*>(dx_row(t) + g * p->J) = Word{};
    }
  }
};

}  // namespace flashcell::cuda
