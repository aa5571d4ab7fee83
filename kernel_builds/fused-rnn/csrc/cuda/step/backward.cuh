// One backward step of a tile: the product with the next step's dr completes the gradient of the
// states, then the cell runs. The gradients are kept in `dstate`, unrounded, from launch to launch.
#pragma once
#include "flow.cuh"

namespace flashcell::cuda {

enum BackwardMark : unsigned {
  kRunsBack = 1,
  kZerosBack = 2,
  kCarriesBack = 4,
  kJoins = 8,
  kFromLast = 16,
  kClears = 32
};

// Returns the place of a column at step t.
DEVICE Place backward_place(const BackwardParams& p, int t, const Column& column, bool present) {
  Place place = {};
  place.row = column.row + t, place.index = int(column.index);
  if (!present) return place;
  const bool carries = t < column.length, held = column.holds(p, t);
  const bool clears = column.resets(p, t + 1);
  const bool padded = !carries && t >= 0 && t < column.length + column.padding;
  if (column.runs(t) && !held) place.marks |= kRunsBack;
  if (held || padded) place.marks |= kZerosBack;
  if (carries) place.marks |= kCarriesBack;
  if (column.runs(t + 1) && !clears && !column.holds(p, t + 1)) place.marks |= kJoins;
  if (t == column.length - 1) place.marks |= kFromLast;
  if (clears) place.marks |= kClears;
  return place;
}

// One unit of one sequence. load() reads everything except the product, before the product is
// ready.
template <typename Cell, typename IO, typename V>
class BackwardCell {
 public:
  DEVICE void load(bool inside, const BackwardParams& p, const Step& step, const Place& place,
                   int head, int unit) {
    const int at = head * step.D + unit;
    const void* states = place.marks & kFromLast ? p.dlast : p.dstate;
    const bool starts =
        inside && place.marks & kCarriesBack && !(place.marks & kClears) && states != nullptr;
    const float* from = static_cast<const float*>(states) + int64_t(place.index) * step.ND + at;
#pragma unroll
    for (int k = 0; k < Cell::kStates; ++k) {
      d_[k] = load_float(starts && k < Cell::kGradStates, from + k * step.SND);
    }
    const bool runs = inside && place.marks & kRunsBack;
    dh_ = load_io(runs, static_cast<const IO*>(p.dh) + place.row * step.ND + at);
    const IO* saved = static_cast<const IO*>(p.saved) + place.row * Cell::kSaved * step.ND + at;
#pragma unroll
    for (int v = 0; v < Cell::kSaved; ++v) saved_[v] = load_io(runs, saved + int64_t(v) * step.ND);
  }

  // Runs the cell, and also returns its share of every row of the bias gradient.
  DEVICE void finish(const BackwardParams& p, const Step& step, const Place& place, int at,
                     float product, float (&dbias)[Cell::kBias]) const {
    IO* dx = static_cast<IO*>(p.dx) + place.row * Cell::kGates * step.ND + at;
    IO* dr = static_cast<IO*>(p.dr) + place.row * Cell::kGates * step.ND + at;
#pragma unroll
    for (int row = 0; row < Cell::kBias; ++row) dbias[row] = 0;
    if (place.marks & kZerosBack) {
      for (int g = 0; g < Cell::kGates; ++g) {
        dx[int64_t(g) * step.ND] = from_float<IO>(0);
        if (p.dr) dr[int64_t(g) * step.ND] = from_float<IO>(0);
      }
    }
    if (!(place.marks & kCarriesBack)) return;
    V d[Cell::kStates];
#pragma unroll
    for (int k = 0; k < Cell::kStates; ++k) d[k] = V(d_[k]);
    if (place.marks & kJoins) d[0] += V(clip(product, float(p.grad_clip)));
    if (place.marks & kRunsBack) {
      V saved[Cell::kSaved], dxs[Cell::kGates], drs[Cell::kGates];
#pragma unroll
      for (int v = 0; v < Cell::kSaved; ++v) saved[v] = V(to_float(saved_[v]));
      d[0] += V(to_float(dh_));
      if constexpr (kHasBound<Cell>) {
        Cell::backward(saved, d, dxs, drs, bound_or_none<V>(p.bound));
      } else {
        Cell::backward(saved, d, dxs, drs);
      }
#pragma unroll
      for (int g = 0; g < Cell::kGates; ++g) {
        dbias[g] = to_float(dxs[g]);
        dx[int64_t(g) * step.ND] = from_float<IO>(dbias[g]);
        if (Cell::kSplitGrad) dr[int64_t(g) * step.ND] = from_float<IO>(to_float(drs[g]));
      }
      if (Cell::kBias > Cell::kGates) dbias[Cell::kBias - 1] = to_float(drs[Cell::kGates - 1]);
    }
    float* dstate = static_cast<float*>(p.dstate) + int64_t(place.index) * step.ND + at;
#pragma unroll
    for (int k = 0; k < Cell::kStates; ++k) dstate[k * step.SND] = to_float(d[k]);
  }

 private:
  float d_[Cell::kStates];
  IO saved_[Cell::kSaved], dh_;
};

// Adds the bias gradients that the cells of a rank left in place of its partial sums, in the order
// of the sequences.
template <typename Cell, typename Product>
DEVICE void add_dbias(const BackwardParams& p, const Step& step, const Tile<Product>& tile) {
  const int bits = tile.bits, unit = tile.rank << bits, sequences = tile.sequences(p);
  const int tiles = (sequences + kColumns - 1) / kColumns;
  for (int i = threadIdx.x; i < (tiles * Cell::kBias) << bits; i += Product::kThreads) {
    const int of = unit + (i & ((1 << bits) - 1)), at = tile.unit + of;
    const int row = (i >> bits) % Cell::kBias, first = (i >> bits) / Cell::kBias * kColumns;
    if (at >= step.D) continue;
    float* to = static_cast<float*>(p.dbias_partial) +
                ((tile.first + first) / kColumns * Cell::kBias + row) * step.ND +
                tile.head * step.D + at;
    float sum = step.t == p.T - 1 ? 0.0f : *to;
    for (int c = first; c < sequences && c < first + kColumns; ++c) {
      sum += *Product::at(row, 0, c, of);
    }
    *to = sum;
  }
}

template <typename Cell, typename IO, typename Product>
__global__ void __launch_bounds__(Product::kThreads, Product::kResident) backward_step_kernel(
    const __grid_constant__ BackwardParams p, const __grid_constant__ Step step) {
  __shared__ Places<Product::kSequences> places;
  const Tile<Product> tile(step);

  Task task;
  task.weight = static_cast<const IO*>(p.weight) + int64_t(tile.head) * step.D * step.D;
  task.weight_gate = int64_t(step.ND) * step.D, task.operand_gate = step.ND;
  task.D = step.D, task.unit = tile.unit, task.states = false;
  task.begin = tile.rank * step.share;
  task.end = min(task.begin + step.share, Cell::kGates * step.D);
  typename Product::Weights weights;
  const auto find = [&](int64_t s, bool& runs, bool& listed) {
    const Column column(p, s);
    Place place = backward_place(p, step.t, column, s < p.S);
    runs = column.runs(step.t + 1);
    listed =
        step.t == p.T - 1 || (s < p.S && (step.t < 0 || step.t < column.length + column.padding));
    if (place.marks & kJoins) {
      const IO* dr = static_cast<const IO*>(Cell::kSplitGrad ? p.dr : p.dx);
      place.operand = dr + (place.row + 1) * Cell::kGates * step.ND + tile.head * step.D;
    }
    return place;
  };
  if (!begin<Product>(task, weights, places, p, step, tile.first, step.t + 1, find)) return;

  using ThisCell = BackwardCell<Cell, IO, typename Product::Value>;
  static_assert(Cell::kBias <= Product::kSlices);
  multiply_and_finish<Product, ThisCell>(
      task, weights, p, step, tile,
      [&](const ThisCell& cell, int column, int of, const float (&product)[1]) {
        float dbias[Cell::kBias];
        cell.finish(p, step, places.place[column], tile.head * step.D + tile.unit + of, product[0],
                    dbias);
    // Only this thread reads the partial sums of this cell in this block, so they can be
    // overwritten.
#pragma unroll
        for (int row = 0; row < Cell::kBias; ++row) *Product::at(row, 0, column, of) = dbias[row];
      });
  __syncthreads();
  if (p.dbias_partial != nullptr && (step.t >= 0 || p.T == 0)) {
    add_dbias<Cell, Product>(p, step, tile);
  }
  if (task.columns > 0) leave(1 << step.rank_bits);
}

}  // namespace flashcell::cuda
