// One forward step of a tile: the product with the states of the step before, then the cell. States
// live in `last`, unrounded, from launch to launch.
#pragma once
#include "step_tile.cuh"

namespace flashcell::cuda {

// Unit `at` (head * D + unit) of sequence s. All it needs but the product is loaded on
// construction.
template <typename Cell, typename IO, typename V>
class ForwardCell {
 public:
  DEVICE ForwardCell(const ForwardParams& p, const Step& step, int64_t s, int64_t at)
      : column_(p, s, p.x_batch), s_(s), at_(at) {
    const int64_t ND = p.N * p.D;
    runs_ = column_.runs(step.t), held_ = column_.holds(p, step.t);
    padded_ = !runs_ && step.t < column_.length + column_.padding;
    carries_ = runs_ || (step.t == 0 && column_.length == 0);
    const void* from = step.t > 0 ? p.last : p.initial;
    if (!carries_ || column_.resets(p, step.t)) from = nullptr;
#pragma unroll
    for (int k = 0; k < Cell::kStates; ++k) {
      const int64_t i = (k * p.S + column_.index) * ND + at;
      state_[k] = V(from != nullptr ? static_cast<const float*>(from)[i] : 0.0f);
    }
    const float* bias = static_cast<const float*>(p.bias);
#pragma unroll
    for (int row = 0; row < Cell::kBias; ++row) {
      bias_[row] = V(bias != nullptr ? bias[row * ND + at] : 0.0f);
    }
    if (!runs_ || held_) return;
    const int64_t head = at / p.D;
    const IO* x = static_cast<const IO*>(p.x) + column_.x_offset + step.t * p.x_time +
                  head * p.x_head + (at - head * p.D);
#pragma unroll
    for (int g = 0; g < Cell::kGates; ++g) x_[g] = V(to_float(x[g * p.x_gate]));
  }

  DEVICE void finish(const ForwardParams& p, const Step& step,
                     const float (&product)[Cell::kGates]) {
    const int64_t ND = p.N * p.D, row = column_.row + step.t;
    IO* h = static_cast<IO*>(p.h) + row * ND + at_;
    IO* h_prev = p.h_prev ? static_cast<IO*>(p.h_prev) + row * ND + at_ : nullptr;
    IO* saved = p.saved ? static_cast<IO*>(p.saved) + row * Cell::kSaved * ND + at_ : nullptr;
    if (held_ || padded_) {  // a step that does not run leaves zeros
      *h = from_float<IO>(0);
      if (h_prev) *h_prev = from_float<IO>(0);
      for (int v = 0; saved && v < Cell::kSaved; ++v) saved[v * ND] = from_float<IO>(0);
      return carry(p, step, state_);
    }
    if (!runs_) return carry(p, step, state_);
    V x[Cell::kGates], r[Cell::kGates], next[Cell::kStates], values[Cell::kSaved];
#pragma unroll
    for (int g = 0; g < Cell::kGates; ++g) x[g] = x_[g] + bias_[g], r[g] = V(product[g]);
    if (Cell::kBias > Cell::kGates) r[Cell::kGates - 1] += bias_[Cell::kBias - 1];
    Cell::forward(x, r, state_, next, values);
    *h = from_float<IO>(to_float(next[0]));
    if (h_prev) *h_prev = from_float<IO>(to_float(state_[0]));
    if (saved) {
#pragma unroll
      for (int v = 0; v < Cell::kSaved; ++v) saved[v * ND] = from_float<IO>(to_float(values[v]));
    }
    carry(p, step, next);
  }

 private:
  DEVICE void carry(const ForwardParams& p, const Step& step, const V (&state)[Cell::kStates]) {
    if (!carries_) return;
    const int64_t ND = p.N * p.D;
    float* last = static_cast<float*>(p.last) + column_.index * ND + at_;
#pragma unroll
    for (int k = 0; k < Cell::kStates; ++k) last[k * p.S * ND] = to_float(state[k]);
    if (step.operand == nullptr) return;
    static_cast<IO*>(step.operand)[((step.t + 1) % 2 * p.S + s_) * ND + at_] =
        from_float<IO>(to_float(state[0]));
  }

  Column column_;
  int64_t s_, at_;
  bool runs_, held_, padded_, carries_;
  V state_[Cell::kStates], bias_[Cell::kBias], x_[Cell::kGates];
};

template <typename Cell, typename IO, typename Product>
__global__ void __launch_bounds__(Product::kThreads, 1) forward_step_kernel(
    const __grid_constant__ ForwardParams p, const Step step) {
  __shared__ const void* rows[Product::kSequences];
  const Tile tile(p, step.ranks, Product::kUnits, Product::kSequences);
  const int64_t ND = p.N * p.D;
  const bool from_states = step.t == 0;
  bool runs = false, listed = false;
  if (threadIdx.x < Product::kSequences) {
    const int64_t s = tile.first + threadIdx.x;
    const Column column(p, s);
    runs = column.runs(step.t);
    listed = s < p.S && (step.t == 0 || step.t < column.length + column.padding);
    const void* row = nullptr;
    if (runs && !column.resets(p, step.t) && !column.holds(p, step.t)) {
      const int64_t at = tile.head * p.D;
      if (!from_states) {
        row = static_cast<const IO*>(step.operand) + (step.t % 2 * p.S + s) * ND + at;
      } else if (p.initial != nullptr) {
        row = static_cast<const float*>(p.initial) + column.index * ND + at;
      }
    }
    rows[threadIdx.x] = row;
  }
  const int running = __syncthreads_count(runs);  // the first of the tile: longest first
  if (!__syncthreads_or(listed)) return;

  // The cells of a rank: its part of the units, of every sequence. Neighbours in a row are
  // neighbouring threads.
  const int units = Product::kUnits / step.ranks, unit = tile.rank * units;
  const int64_t left = p.S - tile.first;
  const int cells = units * (left < Product::kSequences ? int(left) : Product::kSequences);
  const auto start = [&](int i) {
    const int64_t at = tile.unit + unit + i % units;
    const bool inside = i < cells && at < p.D;
    return ForwardCell<Cell, IO, typename Product::Value>(
        p, step, inside ? tile.first + i / units : p.S, tile.head * p.D + (inside ? at : 0));
  };
  auto cell = start(threadIdx.x);  // its loads take their time during the product

  if (running > 0) {
    Task task;
    task.weight = static_cast<const IO*>(p.weight) + tile.head * p.D * p.D;
    task.weight_gate = ND * p.D, task.operand_gate = 0;
    task.D = int(p.D), task.unit = int(tile.unit);
    task.begin = tile.rank * step.share, task.end = min(task.begin + step.share, task.D);
    task.columns = running, task.rows = rows, task.states = from_states;
    Product::run(task);
    meet(step.ranks);
  }
  for (int i = threadIdx.x; i < cells; i += Product::kThreads) {
    if (i != threadIdx.x) cell = start(i);
    if (tile.unit + unit + i % units >= p.D) continue;
    float product[Cell::kGates] = {};
    if (i / units < running) Product::sum(product, step.ranks, i / units, unit + i % units);
    cell.finish(p, step, product);
  }
  if (running > 0) leave(step.ranks);
}

}  // namespace flashcell::cuda
