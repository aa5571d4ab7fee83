// One cell: what a thread reads besides the products, and what it writes.
#pragma once
#include "../tensor_core.cuh"
#include "call.h"
#include "common/cuda/ptx/programmatic_launch.cuh"

namespace flashcell::cuda {

// With exact fp32, the cell is computed in exact fp32 too.
template <typename IO>
using CellValue = std::conditional_t<sizeof(IO) == 4, float, typename IoTraits<IO>::Value>;

template <typename IO>
DEVICE float load_view(const StateView& view, int64_t row, int64_t unit) {
  if (view.data == nullptr) return 0;
  const int64_t at = row * view.row + unit * view.unit;
  if (view.is_io) return to_float(static_cast<const IO*>(view.data)[at]);
  return static_cast<const float*>(view.data)[at];
}

template <typename IO>
DEVICE void store(void* to, int64_t at, float value) {
  static_cast<IO*>(to)[at] = from_float<IO>(value);
}

// Runs the cell of unit d of sequence b, and writes its results. x and r are the products with the
// input and with h.
template <typename Cell, typename IO>
DEVICE void run_cell(const CellForward& p, int64_t b, int64_t d, const float (&x)[Cell::kGates],
                     const float (&r)[Cell::kGates]) {
  using V = CellValue<IO>;
  constexpr int kGates = Cell::kGates, kStates = Cell::kStates;
  // The last gate's recurrent bias stays apart if the cell has one bias row more than gates.
  constexpr int kSummed = 2 * kGates - Cell::kBias;
  const int64_t at = b * p.D + d;
  V xs[kGates], rs[kGates], state[kStates], next[kStates], values[Cell::kSaved];
#pragma unroll
  for (int k = 0; k < kStates; ++k) state[k] = V(load_view<IO>(p.initial[k], b, d));
#pragma unroll
  for (int g = 0; g < kGates; ++g) {
    xs[g] = V(x[g]), rs[g] = V(r[g]);
    if (p.b_ih == nullptr) continue;
    const float of_x = to_float(static_cast<const IO*>(p.b_ih)[g * p.D + d]);
    const float of_h = to_float(static_cast<const IO*>(p.b_hh)[g * p.D + d]);
    if (g < kSummed) {
      xs[g] += V(of_x + of_h);
    } else {
      xs[g] += V(of_x), rs[g] += V(of_h);
    }
  }
  Cell::forward(xs, rs, state, next, values);
#pragma unroll
  for (int k = 0; k < kStates; ++k) {
    if (p.next[k] != nullptr) store<IO>(p.next[k], at, to_float(next[k]));
  }
  if (p.h != nullptr) store<IO>(p.h, at, to_float(next[0]));
  if (p.h_prev != nullptr) store<IO>(p.h_prev, at, to_float(state[0]));
  if (p.saved == nullptr) return;
#pragma unroll
  for (int v = 0; v < Cell::kSaved; ++v) {
    store<IO>(p.saved, (b * Cell::kSaved + v) * p.D + d, to_float(values[v]));
  }
}

}  // namespace flashcell::cuda
