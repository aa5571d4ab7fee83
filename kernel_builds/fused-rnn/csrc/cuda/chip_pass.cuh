// The two passes of the whole-chip engine: what a column multiplies at a step, what a block reads,
// and what it does with the product. The forward multiplies h [D] by gates x D rows, the backward
// dr [gates x D] by D rows of the transposed weight.
#pragma once
#include "chip_plan.h"
#include "exchange.cuh"

namespace flashcell::cuda::chip {

enum Flag : unsigned { kRuns = 1, kResets = 2, kHolds = 4, kPolls = 8, kInitial = 16 };

struct Operand {  // what a column multiplies at a step
  unsigned flags;
  int step;  // whose row of the medium it is, when kPolls
};

struct Spot {       // the unit of a sequence that a thread runs the cell of, at one step
  int64_t row, at;  // of the [B T] rows, of the unit in [N, D]
  unsigned flags;
  bool writes;
};

// Values of a block's 16 units for 8 columns stand 128 apart: inputs as [column][unit], the states
// in the order of the cell threads.
constexpr int kPlane = kUnits * kColumns;

template <typename C, typename T>
struct ForwardPass {
  using Cell = C;
  using IO = T;
  using Params = ForwardParams;
  using Value = typename Lane<IO>::Value;
  static constexpr bool kDescends = false;
  static constexpr int kRows = Cell::kGates, kBias = Cell::kBias;
  static constexpr Shape kShape = forward_shape(kRows, Cell::kStates, sizeof(IO));

  FN static IO* medium(const Params& p) { return static_cast<IO*>(p.h); }

  // kVector elements of row (gate, unit) of the product, from `depth` on.
  DEVICE static uint4 weight(const Params& p, int head, int gate, int, int unit, int depth) {
    const IO* rows = static_cast<const IO*>(p.weight) + (int64_t(gate) * p.N + head) * p.D * p.D;
    return *reinterpret_cast<const uint4*>(rows + int64_t(unit) * p.D + depth);
  }

  // A held step passes the operand on; its own row of h is 0.
  DEVICE static Operand operand(const Params& p, const Column& column, int t) {
    if (!column.runs(t)) return {0, 0};
    const unsigned flags =
        kRuns | (column.resets(p, t) ? kResets : 0) | (column.holds(p, t) ? kHolds : 0);
    if (flags != kRuns) return {flags, 0};
    int step = t - 1;
    while (column.holds(p, step) && !column.resets(p, step)) --step;
    if (column.holds(p, step)) return {flags, 0};
    if (step >= 0) return {flags | kPolls, step};
    return {flags | (p.initial != nullptr ? kInitial : 0), 0};
  }

  DEVICE static const float* initial(const Params& p) {
    return static_cast<const float*>(p.initial);
  }

  DEVICE static const IO* input(const Params& p, const Column& column, int head, int row, int t) {
    return static_cast<const IO*>(p.x) + column.x_offset + t * p.x_time + row * p.x_gate +
           head * p.x_head;
  }

  // `to` is [K, S, N, D] less K.
  DEVICE static float first_state(const Params& p, int k, int64_t to) {
    return p.initial != nullptr ? initial(p)[k * p.S * p.N * p.D + to] : 0.0f;
  }
  DEVICE static void last_state(const Params& p, int k, int64_t to, float value) {
    static_cast<float*>(p.last)[k * p.S * p.N * p.D + to] = value;
  }

  DEVICE static void cell(const Params& p, const Spot& spot, const float (&product)[kRows],
                          const IO* inputs, const float* bias, float* states, float*) {
    const bool resets = spot.flags & kResets, holds = spot.flags & kHolds;
    Value x[kRows], r[kRows], now[Cell::kStates], next[Cell::kStates], saved[Cell::kSaved];
#pragma unroll
    for (int g = 0; g < kRows; ++g) {
      x[g] = to_float(inputs[g * kPlane]) + bias[g * kUnits];
      r[g] = product[g];
    }
    if (kBias > kRows) r[kRows - 1] += bias[(kBias - 1) * kUnits];
#pragma unroll
    for (int k = 0; k < Cell::kStates; ++k) now[k] = resets ? 0.0f : states[k * kPlane];
    Cell::forward(x, r, now, next, saved);

    const int64_t ND = p.N * p.D;
    const float h[1] = {holds ? 0.0f : to_float(next[0])};
    publish<IO>(medium(p) + spot.row * ND + spot.at, 0, h, spot.writes);
    if (!spot.writes) return;
#pragma unroll
    for (int k = 0; k < Cell::kStates; ++k) states[k * kPlane] = to_float(holds ? now[k] : next[k]);
    if (p.h_prev != nullptr) {
      const float value = holds ? 0.0f : to_float(now[0]);
      static_cast<IO*>(p.h_prev)[spot.row * ND + spot.at] = from_float<IO>(value);
    }
    if (p.saved != nullptr) {
      IO* to = static_cast<IO*>(p.saved) + spot.row * Cell::kSaved * ND + spot.at;
#pragma unroll
      for (int v = 0; v < Cell::kSaved; ++v, to += ND) {
        *to = from_float<IO>(holds ? 0.0f : to_float(saved[v]));
      }
    }
  }

  // clear(tensor, rows of a step) zeroes the block's units in the padding.
  template <typename Clear>
  DEVICE static void pad(const Params& p, const Clear& clear) {
    clear(medium(p), 1);
    if (p.h_prev != nullptr) clear(static_cast<IO*>(p.h_prev), 1);
    if (p.saved != nullptr) clear(static_cast<IO*>(p.saved), Cell::kSaved);
  }
};

template <typename C, typename T>
struct BackwardPass {
  using Cell = C;
  using IO = T;
  using Params = BackwardParams;
  using Value = typename Lane<IO>::Value;
  static constexpr bool kDescends = true;
  static constexpr int kRows = 1, kGates = Cell::kGates, kBias = Cell::kBias;
  static constexpr Shape kShape =
      backward_shape(kGates, Cell::kStates, Cell::kSaved, kBias, sizeof(IO));

  FN static IO* medium(const Params& p) {
    return static_cast<IO*>(Cell::kSplitGrad ? p.dr : p.dx);
  }

  // kVector elements of row `unit` of the transposed product, from (gate, depth) on.
  DEVICE static uint4 weight(const Params& p, int head, int, int gate, int unit, int depth) {
    const IO* from = static_cast<const IO*>(p.weight) +
                     ((int64_t(gate) * p.N + head) * p.D + depth) * p.D + unit;
    union {
      uint4 vector;
      IO elements[Lane<IO>::kVector];
    } column{};
#pragma unroll
    for (int i = 0; i < Lane<IO>::kVector; ++i) column.elements[i] = from[i * p.D];
    return column.vector;
  }

  DEVICE static Operand operand(const Params& p, const Column& column, int t) {
    unsigned flags = (column.runs(t) ? kRuns : 0) | (column.holds(p, t) ? kHolds : 0);
    if (column.resets(p, t + 1)) {
      flags |= kResets;
    } else if (column.runs(t + 1) && !column.holds(p, t + 1)) {
      flags |= kPolls;
    }
    return {flags, t + 1};
  }

  DEVICE static const IO* input(const Params& p, const Column& column, int head, int row, int t) {
    const int64_t step = column.row + t, width = p.N * p.D;
    const IO* from = row < Cell::kSaved
                         ? static_cast<const IO*>(p.saved) + (step * Cell::kSaved + row) * width
                         : static_cast<const IO*>(p.dh) + step * width;
    return from + head * p.D;
  }

  DEVICE static float first_state(const Params& p, int k, int64_t to) {
    if (p.dlast == nullptr || k >= Cell::kGradStates) return 0.0f;
    return static_cast<const float*>(p.dlast)[k * p.S * p.N * p.D + to];
  }
  DEVICE static void last_state(const Params& p, int k, int64_t to, float value) {
    static_cast<float*>(p.dstate)[k * p.S * p.N * p.D + to] = k < Cell::kGradStates ? value : 0.0f;
  }

  DEVICE static void cell(const Params& p, const Spot& spot, const float (&product)[1],
                          const IO* inputs, const float*, float* states, float* sums) {
    Value d[Cell::kStates], dx[kGates], dr[kGates], saved[Cell::kSaved];
    const bool steps = (spot.flags & (kRuns | kHolds)) == kRuns;
#pragma unroll
    for (int k = 0; k < Cell::kStates; ++k) {
      d[k] = spot.flags & kResets ? 0.0f : states[k * kPlane];
    }
    if (spot.flags & kPolls) d[0] += clip(product[0], float(p.grad_clip));
    if (steps) {
#pragma unroll
      for (int v = 0; v < Cell::kSaved; ++v) saved[v] = to_float(inputs[v * kPlane]);
      d[0] += to_float(inputs[Cell::kSaved * kPlane]);
      Cell::backward(saved, d, dx, dr);
    }

    const int64_t ND = p.N * p.D;
    float rounded[kGates];
#pragma unroll
    for (int g = 0; g < kGates; ++g) rounded[g] = steps ? to_float(dr[g]) : 0.0f;
    const int64_t to = spot.row * kGates * ND + spot.at;
    publish<IO>(medium(p) + to, ND, rounded, spot.writes);
#pragma unroll
    for (int k = 0; k < Cell::kStates; ++k) states[k * kPlane] = to_float(d[k]);
    if (!spot.writes) return;
#pragma unroll
    for (int g = 0; g < kGates; ++g) {
      const float value = steps ? to_float(dx[g]) : 0.0f;
      if (Cell::kSplitGrad) static_cast<IO*>(p.dx)[to + g * ND] = from_float<IO>(value);
      sums[g * kPlane] += value;
    }
    if (kBias > kGates) sums[kGates * kPlane] += rounded[kGates - 1];
  }

  template <typename Clear>
  DEVICE static void pad(const Params& p, const Clear& clear) {
    clear(static_cast<IO*>(p.dx), kGates);
    if (Cell::kSplitGrad) clear(static_cast<IO*>(p.dr), kGates);
  }
};

}  // namespace flashcell::cuda::chip
