// One backward step of a tile: the product with dr of the step after completes the gradient of the
// states, then the cell. Gradients live in `dstate`, unrounded, from launch to launch.
#pragma once
#include "step_tile.cuh"

namespace flashcell::cuda {

// Unit `at` (head * D + unit) of sequence s. All it needs but the product is loaded on
// construction.
template <typename Cell, typename IO, typename V>
class BackwardCell {
 public:
  DEVICE BackwardCell(const BackwardParams& p, const Step& step, int64_t s, int64_t at)
      : column_(p, s), at_(at) {
    const int64_t ND = p.N * p.D;
    const int t = step.t;
    carries_ = s < p.S && t < column_.length;
    padded_ = s < p.S && !carries_ && t >= 0 && t < column_.length + column_.padding;
    runs_ = column_.runs(t), held_ = column_.holds(p, t);
    joins_ = column_.runs(t + 1) && !column_.resets(p, t + 1) && !column_.holds(p, t + 1);
    const bool starts = t == column_.length - 1;
    const void* from = starts ? p.dlast : p.dstate;
    if (!carries_ || column_.resets(p, t + 1)) from = nullptr;
#pragma unroll
    for (int k = 0; k < Cell::kStates; ++k) {
      const int64_t i = (k * p.S + column_.index) * ND + at;
      const bool present = from != nullptr && k < Cell::kGradStates;
      d_[k] = V(present ? static_cast<const float*>(from)[i] : 0.0f);
    }
    if (!runs_ || held_) return;
    const int64_t row = column_.row + t;
    dh_ = V(to_float(static_cast<const IO*>(p.dh)[row * ND + at]));
    const IO* saved = static_cast<const IO*>(p.saved) + row * Cell::kSaved * ND + at;
#pragma unroll
    for (int v = 0; v < Cell::kSaved; ++v) saved_[v] = V(to_float(saved[v * ND]));
  }

  // Also the part of this cell in the gradient of every row of the bias.
  DEVICE void finish(const BackwardParams& p, const Step& step, float product,
                     float (&dbias)[Cell::kBias]) {
    const int64_t ND = p.N * p.D, to = (column_.row + step.t) * Cell::kGates * ND + at_;
#pragma unroll
    for (int row = 0; row < Cell::kBias; ++row) dbias[row] = 0;
    if (held_ || padded_) {
      for (int g = 0; g < Cell::kGates; ++g) {
        static_cast<IO*>(p.dx)[to + g * ND] = from_float<IO>(0);
        if (p.dr) static_cast<IO*>(p.dr)[to + g * ND] = from_float<IO>(0);
      }
    }
    if (!carries_) return;
    if (joins_) d_[0] += V(clip(product, float(p.grad_clip)));
    if (runs_ && !held_) {
      V dx[Cell::kGates], dr[Cell::kGates];
      d_[0] += dh_;
      Cell::backward(saved_, d_, dx, dr);
#pragma unroll
      for (int g = 0; g < Cell::kGates; ++g) {
        dbias[g] = to_float(dx[g]);
        static_cast<IO*>(p.dx)[to + g * ND] = from_float<IO>(dbias[g]);
        if (Cell::kSplitGrad) {
          static_cast<IO*>(p.dr)[to + g * ND] = from_float<IO>(to_float(dr[g]));
        }
      }
      if (Cell::kBias > Cell::kGates) dbias[Cell::kBias - 1] = to_float(dr[Cell::kGates - 1]);
    }
    float* dstate = static_cast<float*>(p.dstate) + column_.index * ND + at_;
#pragma unroll
    for (int k = 0; k < Cell::kStates; ++k) dstate[k * p.S * ND] = to_float(d_[k]);
  }

 private:
  Column column_;
  int64_t at_;
  bool carries_, padded_, runs_, held_, joins_;
  V d_[Cell::kStates], saved_[Cell::kSaved], dh_;
};

// Adds what the cells of a rank left in the place of its partial sums, sequences in their order.
template <typename Cell, typename Product>
DEVICE void add_dbias(const BackwardParams& p, const Step& step, const Tile& tile, int units,
                      int sequences) {
  const int tiles = (sequences + kColumns - 1) / kColumns, unit = tile.rank * units;
  const int64_t ND = p.N * p.D;
  for (int i = threadIdx.x; i < units * tiles * Cell::kBias; i += Product::kThreads) {
    const int64_t at = tile.unit + unit + i % units;
    const int row = i / units % Cell::kBias, first = i / units / Cell::kBias * kColumns;
    if (at >= p.D) continue;
    float* to = static_cast<float*>(p.dbias_partial) +
                ((tile.first + first) / kColumns * Cell::kBias + row) * ND + tile.head * p.D + at;
    float sum = step.t == p.T - 1 ? 0.0f : *to;
    for (int c = first; c < sequences && c < first + kColumns; ++c) {
      sum += *Product::at(row, 0, c, unit + i % units);
    }
    *to = sum;
  }
}

template <typename Cell, typename IO, typename Product>
__global__ void __launch_bounds__(Product::kThreads, 1) backward_step_kernel(
    const __grid_constant__ BackwardParams p, const Step step) {
  __shared__ const void* rows[Product::kSequences];
  const Tile tile(p, step.ranks, Product::kUnits, Product::kSequences);
  const int64_t ND = p.N * p.D;
  bool runs = false, listed = step.t == p.T - 1;
  if (threadIdx.x < Product::kSequences) {
    const int64_t s = tile.first + threadIdx.x;
    const Column column(p, s);
    runs = column.runs(step.t + 1);
    listed |= s < p.S && (step.t < 0 || step.t < column.length + column.padding);
    const bool joins = runs && !column.resets(p, step.t + 1) && !column.holds(p, step.t + 1);
    const IO* dr = static_cast<const IO*>(Cell::kSplitGrad ? p.dr : p.dx);
    rows[threadIdx.x] =
        joins ? dr + (column.row + step.t + 1) * Cell::kGates * ND + tile.head * p.D : nullptr;
  }
  const int running = __syncthreads_count(runs);  // the first of the tile: longest first
  if (!__syncthreads_or(listed)) return;

  const int units = Product::kUnits / step.ranks, unit = tile.rank * units;
  const int64_t left = p.S - tile.first;
  const int sequences = left < Product::kSequences ? int(left) : Product::kSequences;
  const int cells = units * sequences;
  const auto start = [&](int i) {
    const int64_t at = tile.unit + unit + i % units;
    const bool inside = i < cells && at < p.D;
    return BackwardCell<Cell, IO, typename Product::Value>(
        p, step, inside ? tile.first + i / units : p.S, tile.head * p.D + (inside ? at : 0));
  };
  auto cell = start(threadIdx.x);  // its loads take their time during the product

  if (running > 0) {
    Task task;
    task.weight = static_cast<const IO*>(p.weight) + tile.head * p.D * p.D;
    task.weight_gate = ND * p.D, task.operand_gate = ND;
    task.D = int(p.D), task.unit = int(tile.unit);
    task.begin = tile.rank * step.share;
    task.end = min(task.begin + step.share, Cell::kGates * task.D);
    task.columns = running, task.rows = rows, task.states = false;
    Product::run(task);
    meet(step.ranks);
  }
  for (int i = threadIdx.x; i < cells; i += Product::kThreads) {
    if (i != threadIdx.x) cell = start(i);
    if (tile.unit + unit + i % units >= p.D) continue;
    float product[1] = {}, dbias[Cell::kBias];
    if (i / units < running) Product::sum(product, step.ranks, i / units, unit + i % units);
    cell.finish(p, step, product[0], dbias);
    // Nobody else reads the partial sums of this cell in this block.
    static_assert(Cell::kBias <= Product::kSlices);
#pragma unroll
    for (int row = 0; row < Cell::kBias; ++row) {
      *Product::at(row, 0, i / units, unit + i % units) = dbias[row];
    }
  }
  __syncthreads();
  if (p.dbias_partial != nullptr && (step.t >= 0 || p.T == 0)) {
    add_dbias<Cell, Product>(p, step, tile, units, sequences);
  }
  if (running > 0) leave(step.ranks);
}

}  // namespace flashcell::cuda
