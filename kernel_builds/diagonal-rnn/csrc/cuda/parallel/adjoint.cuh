// The backward pass of a cell as an element of a linear scan (sequential/linear.cuh): the carry is
// the gradient of the states, and the map of a step is its transposed Jacobian. Gates are
// recomputed from x and the saved states by the cell's own equations.
#pragma once
#include "../sequential/linear.cuh"

namespace flashcell::cuda {

// With kStatesOnce the sequential pass reads states once per group of steps and recomputes those in
// between. This reads fewer bytes (GRU 28.5 instead of 32 in groups of 8, LSTM 30 instead of 36 in
// groups of 4) and computes no more gates, which the gradient needs anyway.
template <typename Cell, typename IOOf, int kNOf, bool kMaskedOf, bool kStatesOnce = false>
struct Adjoint {
  using Params = BackwardParams;
  using IO = IOOf;
  using Word = cuda::Word<IO, kNOf>;
  using V = Real<kIsCoarse<IO>>;
  static constexpr int kN = kNOf, kStates = Cell::kStates, kGates = Cell::kGates;
  static constexpr int kWeights = Cell::kWeights, kRows = kGates + kStates + 1;
  static constexpr int kSums = kWeights + kGates;  // gradients of the weight, then of the bias
  static constexpr bool kMasked = kMaskedOf;
  static constexpr int kDh = kGates, kBefore = kGates + 1;  // rows after x; states before the step
  static constexpr int kOnce = kStatesOnce ? kBefore : kRows;
  static_assert(!(kStatesOnce && kMasked));
  using Raw = Word[kRows];

  const Params* p;
  int64_t index, row, x_row, d;
  int steps, padding;
  IO* dx;  // dx of the first step
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

  // Returns the number of summed gradients: those of the weights and, if there is one, the bias.
  static int64_t sum_rows(const Params& p) { return p.bias == nullptr ? kWeights : kSums; }

  DEVICE int time(int i) const { return steps - 1 - i; }
  // After a step, h holds state 0 unless the step was held; `saved` holds the other states, then
  // state 0.
  DEVICE bool in_h(int k) const { return k == 0 && !(kMasked && p->V == kStates); }
  DEVICE const void* first(int r) const {
    const int64_t t = time(0);
    const int k = r - kBefore;
    if (r < kGates) return static_cast<const IO*>(p->x) + x_row + t * p->x_time + r * p->x_gate + d;
    if (r == kDh) return static_cast<const IO*>(p->dh) + (row + t) * p->D + d;
    if (in_h(k)) return static_cast<const IO*>(p->h) + (row + t - 1) * p->D + d;
    const int v = k == 0 ? kStates - 1 : k - 1;
    return static_cast<const IO*>(p->saved) + ((row + t - 1) * p->V + v) * p->D + d;
  }
  DEVICE int bytes(int r) const {
    const int elements = r < kGates                      ? int(p->x_time)
                         : r == kDh || in_h(r - kBefore) ? int(p->D)
                                                         : int(p->V) * int(p->D);
    return -elements * int(sizeof(IO));
  }
  DEVICE bool needs(int r, int i) const { return r <= kDh || i + 1 < steps; }
  DEVICE Mark mark(int i) const {
    if (!kMasked) return {};
    const int64_t at = row + time(i);
    return {p->reset != nullptr && p->reset[at], p->hold != nullptr && p->hold[at]};
  }

  struct Step {
    V x[kGates], w[kWeights], s[kStates];
  };
  template <int kGiven>
  DEVICE void give(const float (&rows)[kGiven][kN], int c, Step& step) const {
#pragma unroll
    for (int g = 0; g < kGates; ++g) step.x[g] = rows[g][c] + bias[c][g];
#pragma unroll
    for (int q = 0; q < kWeights; ++q) step.w[q] = weight[c][q];
  }
  DEVICE Step step(const float (&rows)[kRows][kN], int i, Mark mark, int c) const {
    Step step;
    give(rows, c, step);
#pragma unroll
    for (int k = 0; k < kStates; ++k) {
      float before = rows[kBefore + k][c];
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
      const float dh = rows[kDh][c];
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

  // Takes the carry of channel c backwards over a step, computes its dx, and adds its share of the
  // weight's gradient.
  DEVICE void take_back(const Step& at, float dh, int c, Mark mark, float (&carry)[kN][kStates],
                        float (&out)[kGates][kN]) {
    V d_state[kStates], dx[kGates], dw[kWeights];
#pragma unroll
    for (int k = 0; k < kStates; ++k) d_state[k] = carry[c][k];
#pragma unroll
    for (int q = 0; q < kWeights; ++q) dw[q] = sums[c][q];
    d_state[0] += V(dh);
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
  DEVICE void keep_dx(int i, const float (&out)[kGates][kN]) const {
    IO* to = dx_row(time(i));
#pragma unroll
    for (int g = 0; g < kGates; ++g) store_away(to + g * p->J, narrow<IO>(out[g]));
  }

  DEVICE void advance(const Raw& raw, int i, Mark mark, float (&carry)[kN][kStates]) {
    float rows[kRows][kN], out[kGates][kN];
#pragma unroll
    for (int r = 0; r < kRows; ++r) widen(raw[r], rows[r]);
#pragma unroll
    for (int c = 0; c < kN; ++c)
      take_back(step(rows, i, mark, c), rows[kDh][c], c, mark, carry, out);
    keep_dx(i, out);
  }

  // Advances over `count` steps from i on. Only the states before the group's last step (the
  // earliest in time) were read; the states of the other steps are recomputed from them.
  template <int kSteps>
  DEVICE void advance_group(const Raw (&raw)[kSteps], int i, int count,
                            float (&carry)[kN][kStates]) {
    Step at[kSteps][kN];
    float before[kStates][kN], dh[kSteps][kN];
#pragma unroll
    for (int n = 0; n < kStates; ++n) widen(raw[kSteps - 1][kBefore + n], before[n]);
#pragma unroll
    for (int k = kSteps - 1; k >= 0; --k) {
      if (k >= count) continue;
      float x[kGates][kN];
#pragma unroll
      for (int g = 0; g < kGates; ++g) widen(raw[k][g], x[g]);
      widen(raw[k][kDh], dh[k]);
#pragma unroll
      for (int c = 0; c < kN; ++c) {
        Step& step = at[k][c];
        give(x, c, step);
        V next[kStates];
#pragma unroll
        for (int n = 0; n < kStates; ++n) step.s[n] = before[n][c];
        Cell::forward(step.x, step.w, step.s, next);
#pragma unroll
        for (int n = 0; n < kStates; ++n) before[n][c] = next[n].v;
      }
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (k >= count) continue;
      float out[kGates][kN];
#pragma unroll
      for (int c = 0; c < kN; ++c) take_back(at[k][c], dh[k][c], c, Mark{}, carry, out);
      keep_dx(i + k, out);
    }
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
  // Zeros dx of the rows [begin, end), past the sequence's end.
  DEVICE void pad(int begin, int end) const {
    for (int t = begin; t < end; ++t) {
#pragma unroll
      for (int g = 0; g < kGates; ++g) *reinterpret_cast<Word*>(dx_row(t) + g * p->J) = Word{};
    }
  }
};

}  // namespace flashcell::cuda
