// The two passes of the grid engine: the operand of a step, the inputs that a block reads, and the
// cell that follows the product. The forward pass multiplies h [D] by gates x D rows of the weight,
// the backward pass multiplies dr [gates x D] by D rows of the transposed weight.
#pragma once
#include "exchange.cuh"
#include "plan.h"

namespace flashcell::cuda::grid {

enum Flag : unsigned { kRuns = 1, kResets = 2, kHolds = 4, kPolls = 8, kInitial = 16 };

struct Operand {  // the operand of a column's product at one step
  unsigned flags;
  int step;  // with kPolls, the step from whose row of the exchange tensor it comes
};

struct Spot {      // where a thread runs the cell: one unit of one sequence at one step
  unsigned row;    // row of [B T]; 2^32 of them would be half a terabyte
  unsigned width;  // N D
  int64_t at;      // offset of the unit in [N, D]
  unsigned flags;
  bool writes;
};

// The masks of a column; without kMarked no step is reset or held.
template <bool kMarked>
struct Steps {
  const Column& column;
  const SequenceParams& p;

  DEVICE bool runs(int t) const { return column.runs(t); }
  DEVICE bool resets(int t) const { return kMarked && column.resets(p, t); }
  DEVICE bool holds(int t) const { return kMarked && column.holds(p, t); }
};

// The number of values of a tile. Planes are kPlane apart: an input's is [column][unit], and a
// state's is in the order of the cell threads.
constexpr int plane(const Shape& s) { return s.units * tile_columns(s); }

// kSides matrix instructions side by side make tiles of 8 or 16 sequences.
template <typename C, typename T, int kSides = 1, int kHeight = kUnits>
struct ForwardPass {
  using Cell = C;
  using IO = T;
  using Params = ForwardParams;
  using Value = typename IoTraits<IO>::Value;
  static constexpr bool kDescends = false;
  static constexpr int kRows = Cell::kGates, kBias = Cell::kBias, kPanels = 1, kSplit = 1;
  static constexpr int kGates = 1;  // gates in a row of the exchange tensor
  static constexpr Shape kShape = forward_shape(kRows, Cell::kStates, sizeof(IO), kSides, kHeight);
  static constexpr int kWide = kSides, kPlane = plane(kShape);

  FN static IO* medium(const Params& p) { return static_cast<IO*>(p.h); }

  // Loads kVector elements of row (gate, unit) of the weight, from `depth` on.
  DEVICE static uint4 weight(const Params& p, int head, int gate, int, int unit, int depth) {
    const IO* rows = static_cast<const IO*>(p.weight) + (int64_t(gate) * p.N + head) * p.D * p.D;
    return *reinterpret_cast<const uint4*>(rows + int64_t(unit) * p.D + depth);
  }

  // A held step passes the earlier operand on: its own row of h is 0.
  template <bool kMarked>
  DEVICE static Operand operand(const Params& p, const Steps<kMarked>& steps, int t) {
    if (!steps.runs(t)) return {0, 0};
    const unsigned flags = kRuns | (steps.resets(t) ? kResets : 0) | (steps.holds(t) ? kHolds : 0);
    if (flags != kRuns) return {flags, 0};
    int step = t - 1;
    while (steps.holds(step) && !steps.resets(step)) --step;
    if (steps.holds(step)) return {flags, 0};
    if (step >= 0) return {flags | kPolls, step};
    return {flags | (p.initial != nullptr ? kInitial : 0), 0};
  }
  // Returns the flags of a step if the sequence has all steps and no masks.
  DEVICE static unsigned flags(const Params& p, int t) {
    return kRuns | (t > 0 || p.initial != nullptr ? kPolls : 0);
  }

  // inputs() returns where a row of the inputs starts, input() the offset of a step from there.
  DEVICE static const IO* inputs(const Params& p, int head, int row) {
    return static_cast<const IO*>(p.x) + row * p.x_gate + head * p.x_head;
  }
  DEVICE static int64_t input(const Params& p, const Column& column, int, int t) {
    return column.x_offset + int64_t(t) * int(p.x_time);
  }

  // `to` is an offset in [S, N, D] of state k.
  DEVICE static float first_state(const Params& p, int k, int64_t to) {
    const float* initial = static_cast<const float*>(p.initial);
    return initial != nullptr ? initial[k * p.S * p.N * p.D + to] : 0.0f;
  }
  DEVICE static void last_state(const Params& p, int k, int64_t to, float value) {
    static_cast<float*>(p.last)[k * p.S * p.N * p.D + to] = value;
  }

  struct Unit {  // values that a thread loads for its unit before the product is ready
    Value x[kRows], now[Cell::kStates];
  };
  // `bias` holds the thread's kBias values.
  DEVICE static Unit prepare(const Params&, const Spot& spot, const IO* inputs,
                             const float (&bias)[kBias], const float* states) {
    Unit unit;
#pragma unroll
    for (int g = 0; g < kRows; ++g) unit.x[g] = to_float(inputs[g * kPlane]) + bias[g];
#pragma unroll
    for (int k = 0; k < Cell::kStates; ++k) {
      unit.now[k] = spot.flags & kResets ? 0.0f : states[k * kPlane];
    }
    return unit;
  }

  DEVICE static void cell(const Params& p, const Spot& spot, const Unit& unit, const float* product,
                          const float (&bias)[kBias], float* states) {
    const bool holds = spot.flags & kHolds, multiplied = spot.flags & (kPolls | kInitial);
    const auto& now = unit.now;
    Value r[kRows], next[Cell::kStates], saved[Cell::kSaved];
#pragma unroll
    for (int g = 0; g < kRows; ++g) r[g] = multiplied ? product[g] : 0.0f;
    if (kBias > kRows) r[kRows - 1] += bias[kBias - 1];
    Cell::forward(unit.x, r, now, next, saved);

    const unsigned ND = spot.width;
    const int64_t to_row = int64_t(uint64_t(spot.row) * ND) + spot.at;
    const float h[1] = {holds ? 0.0f : to_float(next[0])};
    publish<IO>(medium(p) + to_row, 0, h, spot.writes);
    if (!spot.writes) return;
#pragma unroll
    for (int k = 0; k < Cell::kStates; ++k) states[k * kPlane] = to_float(holds ? now[k] : next[k]);
    if (p.h_prev != nullptr) {
      const float value = holds ? 0.0f : to_float(now[0]);
      static_cast<IO*>(p.h_prev)[to_row] = from_float<IO>(value);
    }
    if (p.saved != nullptr) {
      IO* to = static_cast<IO*>(p.saved) + uint64_t(spot.row) * (Cell::kSaved * ND) + spot.at;
#pragma unroll
      for (int v = 0; v < Cell::kSaved; ++v, to += ND) {
        *to = from_float<IO>(holds ? 0.0f : to_float(saved[v]));
      }
    }
  }

  // Calls clear(tensor, rows of a step) for the tensors whose padding must become zero.
  template <typename Clear>
  DEVICE static void pad(const Params& p, const Clear& clear) {
    clear(medium(p), 1);
    if (p.h_prev != nullptr) clear(static_cast<IO*>(p.h_prev), 1);
    if (p.saved != nullptr) clear(static_cast<IO*>(p.saved), Cell::kSaved);
  }
};

// The thread blocks of a cluster (kSplit of them) may share the work on their units: each
// multiplies all units by some of the gates, and so reads less of dr.
template <typename C, typename T, int kBlocks = 1, int kSides = 1, int kHeight = kUnits>
struct BackwardPass {
  using Cell = C;
  using IO = T;
  using Params = BackwardParams;
  using Value = typename IoTraits<IO>::Value;
  static constexpr bool kDescends = true;
  static constexpr int kGates = Cell::kGates, kBias = Cell::kBias;
  static constexpr int kSplit = kBlocks, kRows = kSplit, kPanels = kGates / kSplit;
  static constexpr Shape kShape = backward_shape(kGates, Cell::kStates, Cell::kSaved, kBias,
                                                 sizeof(IO), kSplit, kSides, kHeight);
  static constexpr int kWide = kSides, kPlane = plane(kShape);

  FN static IO* medium(const Params& p) { return static_cast<IO*>(Cell::kSplitGrad ? p.dr : p.dx); }

  // Loads kVector elements of row `unit` of the transposed weight, from (gate, depth) on.
  DEVICE static uint4 weight(const Params& p, int head, int, int gate, int unit, int depth) {
    const IO* from = static_cast<const IO*>(p.weight) +
                     ((int64_t(gate) * p.N + head) * p.D + depth) * p.D + unit;
    union {
      uint4 vector;
      IO elements[IoTraits<IO>::kVector];
    } column{};
#pragma unroll
    for (int i = 0; i < IoTraits<IO>::kVector; ++i) column.elements[i] = from[i * p.D];
    return column.vector;
  }

  template <bool kMarked>
  DEVICE static Operand operand(const Params&, const Steps<kMarked>& steps, int t) {
    unsigned flags = (steps.runs(t) ? kRuns : 0) | (steps.holds(t) ? kHolds : 0);
    if (steps.resets(t + 1)) {
      flags |= kResets;
    } else if (steps.runs(t + 1) && !steps.holds(t + 1)) {
      flags |= kPolls;
    }
    return {flags, t + 1};
  }
  // One step more, t = -1, completes the gradient of the initial state, if that is read.
  DEVICE static unsigned flags(const Params& p, int t) {
    return (t >= 0 ? kRuns : 0) | (t + 1 < int(p.T) ? kPolls : 0);
  }

  DEVICE static const IO* inputs(const Params& p, int head, int row) {
    const IO* saved = static_cast<const IO*>(p.saved) + row * p.N * p.D;
    return (row < Cell::kSaved ? saved : static_cast<const IO*>(p.dh)) + head * p.D;
  }
  DEVICE static int64_t input(const Params& p, const Column& column, int row, int t) {
    const unsigned width = unsigned(p.N * p.D) * (row < Cell::kSaved ? Cell::kSaved : 1);
    return int64_t(uint64_t(unsigned(column.row) + t) * width);
  }

  DEVICE static float first_state(const Params& p, int k, int64_t to) {
    if (p.dlast == nullptr || k >= Cell::kGradStates) return 0.0f;
    return static_cast<const float*>(p.dlast)[k * p.S * p.N * p.D + to];
  }
  DEVICE static void last_state(const Params& p, int k, int64_t to, float value) {
    static_cast<float*>(p.dstate)[k * p.S * p.N * p.D + to] = k < Cell::kGradStates ? value : 0.0f;
  }

  struct Unit {  // values that a thread loads for its unit before the product is ready
    Value d[Cell::kStates], saved[Cell::kSaved], dh;
  };
  DEVICE static Unit prepare(const Params&, const Spot& spot, const IO* inputs,
                             const float (&)[kBias], const float* states) {
    Unit unit;
#pragma unroll
    for (int k = 0; k < Cell::kStates; ++k) {
      unit.d[k] = spot.flags & kResets ? 0.0f : states[k * kPlane];
    }
#pragma unroll
    for (int v = 0; v < Cell::kSaved; ++v) unit.saved[v] = to_float(inputs[v * kPlane]);
    unit.dh = to_float(inputs[Cell::kSaved * kPlane]);
    return unit;
  }

  // `states` is followed by the sums of the bias gradient.
  DEVICE static void cell(const Params& p, const Spot& spot, const Unit& unit, const float* product,
                          const float (&)[kBias], float* states) {
    Value d[Cell::kStates], dx[kGates], dr[kGates];
    float* sums = states + Cell::kStates * kPlane;
    const bool steps = (spot.flags & (kRuns | kHolds)) == kRuns;
#pragma unroll
    for (int k = 0; k < Cell::kStates; ++k) d[k] = unit.d[k];
    if (spot.flags & kPolls) d[0] += clip(product[0], float(p.grad_clip));
    if (steps) {
      d[0] += unit.dh;
      Cell::backward(unit.saved, d, dx, dr);
    }

    const unsigned ND = spot.width;
    float rounded[kGates];
#pragma unroll
    for (int g = 0; g < kGates; ++g) rounded[g] = steps ? to_float(dr[g]) : 0.0f;
    const int64_t to = int64_t(uint64_t(spot.row) * (kGates * ND)) + spot.at;
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

}  // namespace flashcell::cuda::grid
