// One forward step of a tile: the product with the states before the step, then the cell. The
// states are kept in `last`, unrounded, from launch to launch.
#pragma once
#include "flow.cuh"

namespace flashcell::cuda {

enum ForwardMark : unsigned { kRuns = 1, kZeros = 2, kCarries = 4, kStarts = 8 };

// Returns the place of column s, in thread s.
DEVICE Place forward_place(const ForwardParams& p, const Step& step, const Column& column) {
  Place place = {};
  const bool runs = column.runs(step.t), held = column.holds(p, step.t);
  const bool carries = runs || (step.t == 0 && column.length == 0);
  place.row = column.row + step.t, place.index = int(column.index);
  place.x = column.x_offset + step.t * p.x_time;
  if (runs && !held) place.marks |= kRuns;
  if (held || (!runs && step.t < column.length + column.padding)) place.marks |= kZeros;
  if (carries) place.marks |= kCarries;
  if (carries && !column.resets(p, step.t)) place.marks |= kStarts;
  return place;
}

// One unit of one sequence. load() reads everything except the product, before the product is
// ready.
template <typename Cell, typename IO, typename V>
class ForwardCell {
 public:
  DEVICE void load(bool inside, const ForwardParams& p, const Step& step, const Place& place,
                   int head, int unit) {
    const int at = head * step.D + unit;
    const float* from = static_cast<const float*>(step.t > 0 ? p.last : p.initial);
    const bool starts = inside && place.marks & kStarts && from != nullptr;
    from += int64_t(place.index) * step.ND + at;
#pragma unroll
    for (int k = 0; k < Cell::kStates; ++k) state_[k] = load_float(starts, from + k * step.SND);
    const bool biased = inside && p.bias != nullptr;
#pragma unroll
    // One of the two loads is not wanted and returns 0.
    for (int row = 0; row < Cell::kBias; ++row) {
      const int64_t from = int64_t(row) * step.ND + at;
      wide_bias_[row] =
          load_float(biased && !p.bias_is_io, static_cast<const float*>(p.bias) + from);
      bias_[row] = load_io(biased && p.bias_is_io, static_cast<const IO*>(p.bias) + from);
    }
    const bool runs = inside && place.marks & kRuns;
    const IO* x = static_cast<const IO*>(p.x) + place.x + head * p.x_head + unit;
#pragma unroll
    for (int g = 0; g < Cell::kGates; ++g) x_[g] = load_io(runs, x + g * p.x_gate);
  }

  // Writes the results of sequence s.
  DEVICE void finish(const ForwardParams& p, const Step& step, const Place& place, int64_t s,
                     int at, const float (&product)[Cell::kGates]) const {
    V state[Cell::kStates];
#pragma unroll
    for (int k = 0; k < Cell::kStates; ++k) state[k] = V(state_[k]);
    const int64_t to = place.row * step.ND + at;
    IO* h = static_cast<IO*>(p.h) + to;
    IO* h_prev = static_cast<IO*>(p.h_prev) + to;
    IO* saved = static_cast<IO*>(p.saved) + place.row * Cell::kSaved * step.ND + at;
    if (place.marks & kRuns) {
      V x[Cell::kGates], r[Cell::kGates], next[Cell::kStates], values[Cell::kSaved];
#pragma unroll
      for (int g = 0; g < Cell::kGates; ++g) {
        x[g] = V(to_float(x_[g])) + V(bias(g)), r[g] = V(product[g]);
      }
      if (Cell::kBias > Cell::kGates) r[Cell::kGates - 1] += V(bias(Cell::kBias - 1));
      if constexpr (kHasBound<Cell>) {
        Cell::forward(x, r, state, next, values, bound_or_none<V>(p.bound));
      } else {
        Cell::forward(x, r, state, next, values);
      }
      *h = from_float<IO>(to_float(next[0]));
      if (p.h_prev) *h_prev = from_float<IO>(state_[0]);
      if (p.saved) {
#pragma unroll
        for (int v = 0; v < Cell::kSaved; ++v) {
          saved[int64_t(v) * step.ND] = from_float<IO>(to_float(values[v]));
        }
      }
#pragma unroll
      for (int k = 0; k < Cell::kStates; ++k) state[k] = next[k];
    } else if (place.marks & kZeros) {  // outputs of a step that does not run are zeros
      *h = from_float<IO>(0);
      if (p.h_prev) *h_prev = from_float<IO>(0);
      for (int v = 0; p.saved && v < Cell::kSaved; ++v) {
        saved[int64_t(v) * step.ND] = from_float<IO>(0);
      }
    }
    if (!(place.marks & kCarries)) return;
    float* last = static_cast<float*>(p.last) + int64_t(place.index) * step.ND + at;
#pragma unroll
    for (int k = 0; k < Cell::kStates; ++k) last[k * step.SND] = to_float(state[k]);
    if (step.operand == nullptr) return;
    static_cast<IO*>(step.operand)[((step.t + 1) % 2 * p.S + s) * step.ND + at] =
        from_float<IO>(to_float(state[0]));
  }

 private:
  // The two are added only here, because the sum has to wait for both loads.
  DEVICE float bias(int row) const { return wide_bias_[row] + to_float(bias_[row]); }

  float state_[Cell::kStates], wide_bias_[Cell::kBias];
  IO x_[Cell::kGates], bias_[Cell::kBias];
};

template <typename Cell, typename IO, typename Product>
__global__ void __launch_bounds__(Product::kThreads, Product::kResident) forward_step_kernel(
    const __grid_constant__ ForwardParams p, const __grid_constant__ Step step) {
  __shared__ Places<Product::kSequences> places;
  const Tile<Product> tile(step);
  const bool from_states = step.t == 0;

  Task task;
  task.weight = static_cast<const IO*>(p.weight) + int64_t(tile.head) * step.D * step.D;
  task.weight_gate = int64_t(step.ND) * step.D, task.operand_gate = 0;
  task.D = step.D, task.unit = tile.unit, task.states = from_states;
  task.begin = tile.rank * step.share, task.end = min(task.begin + step.share, step.D);
  if (from_states && (p.initial == nullptr || p.h_begins_as_zero)) task.end = task.begin;  // h is 0
  if (!step.follows) prefetch_weights<IO, Product>(task);
  typename Product::Weights weights;
  const auto find = [&](int64_t s, bool& runs, bool& listed) {
    const Column column(p, s, p.x_batch);
    Place place = forward_place(p, step, column);
    runs = column.runs(step.t);
    listed = s < p.S && (step.t == 0 || step.t < column.length + column.padding);
    if (s >= p.S) place.marks = 0;
    if (place.marks & kRuns && place.marks & kStarts) {
      const int at = tile.head * step.D;
      if (!from_states) {
        place.operand =
            static_cast<const IO*>(step.operand) + (step.t % 2 * p.S + s) * step.ND + at;
      } else if (p.initial != nullptr) {
        place.operand = static_cast<const float*>(p.initial) + int64_t(place.index) * step.ND + at;
      }
    }
    return place;
  };
  if (!begin<Product>(task, weights, places, p, step, tile.first, step.t, find)) return;

  using ThisCell = ForwardCell<Cell, IO, typename Product::Value>;
  multiply_and_finish<Product, ThisCell>(
      task, weights, p, step, tile,
      [&](const ThisCell& cell, int column, int of, const float (&product)[Cell::kGates]) {
        cell.finish(p, step, places.place[column], tile.first + column,
                    tile.head * step.D + tile.unit + of, product);
      });
  if (task.columns > 0) leave(1 << step.rank_bits);
}

}  // namespace flashcell::cuda
