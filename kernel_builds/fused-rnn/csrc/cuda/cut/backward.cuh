// The backward pass without a recurrent product, for grad_clip = 0: no gradient reaches h through
// the product, so the units of a sequence do not see each other, and one launch runs all steps. A
// thread runs one unit of one sequence, from the last step to the first.
#pragma once
#include "../sequence.cuh"

namespace flashcell::cuda::cut {

// A thread block has these units of these sequences, which share a row of dbias_partial.
constexpr int kUnits = 32, kSequences = 8;
// Steps whose values are loaded before the first of them is computed: only the carried gradients
// are a chain, so that memory is waited for once in so many steps.
constexpr int kAhead = 4;

template <typename Cell, typename IO>
struct Loaded {
  IO saved[Cell::kSaved], dh;
  bool runs, resets;
};

template <typename Cell, typename IO>
DEVICE void load(Loaded<Cell, IO>& to, const BackwardParams& p, const Column& column, int t,
                 int64_t at, int64_t ND) {
  to.resets = column.resets(p, t), to.runs = column.runs(t) && !column.holds(p, t);
  if (!to.runs) return;
  const int64_t row = column.row + t;
  const IO* saved = static_cast<const IO*>(p.saved) + row * Cell::kSaved * ND + at;
#pragma unroll
  for (int v = 0; v < Cell::kSaved; ++v) to.saved[v] = saved[v * ND];
  to.dh = static_cast<const IO*>(p.dh)[row * ND + at];
}

// Writes the gradients of step t, adds to those of the biases, and carries `d` to the step before.
template <typename Cell, typename IO, typename V>
DEVICE void step(const BackwardParams& p, const Loaded<Cell, IO>& now, int64_t row, int64_t at,
                 int64_t ND, V (&d)[Cell::kStates], float (&dbias)[Cell::kBias]) {
  constexpr int kGates = Cell::kGates;
  IO* dx = static_cast<IO*>(p.dx) + row * kGates * ND + at;
  IO* dr = static_cast<IO*>(p.dr) + row * kGates * ND + at;
  V saved[Cell::kSaved], dxs[kGates], drs[kGates];
  if (now.runs) {
#pragma unroll
    for (int v = 0; v < Cell::kSaved; ++v) saved[v] = V(to_float(now.saved[v]));
    d[0] += V(to_float(now.dh));
    Cell::backward(saved, d, dxs, drs);
#pragma unroll
    for (int g = 0; g < kGates; ++g) dbias[g] += to_float(dxs[g]);
    if (Cell::kBias > kGates) dbias[Cell::kBias - 1] += to_float(drs[kGates - 1]);
  } else {
#pragma unroll
    for (int g = 0; g < kGates; ++g) dxs[g] = drs[g] = V(0);
  }
#pragma unroll
  for (int g = 0; g < kGates; ++g) {
    dx[g * ND] = from_float<IO>(to_float(dxs[g]));
    if (Cell::kSplitGrad) dr[g * ND] = from_float<IO>(to_float(drs[g]));
  }
  if (!now.resets) return;
#pragma unroll
  for (int k = 0; k < Cell::kStates; ++k) d[k] = V(0);
}

template <typename Cell, typename IO, typename V>
__global__ void __launch_bounds__(kUnits* kSequences) backward_kernel(
    const __grid_constant__ BackwardParams p, int64_t unit_blocks) {
  constexpr int kBias = Cell::kBias, kStates = Cell::kStates;
  __shared__ float sums[kBias][kSequences][kUnits];
  const int lane = threadIdx.x % kUnits, mine = threadIdx.x / kUnits;
  const int64_t tile = blockIdx.x / unit_blocks;
  const int64_t ND = p.N * p.D, at = blockIdx.x % unit_blocks * kUnits + lane;
  const int64_t s = tile * kSequences + mine;
  const bool inside = s < p.S && at < ND;
  float dbias[kBias] = {};
  if (inside) {
    const Column column(p, s);
    const int64_t state = column.index * ND + at;
    V d[kStates];
#pragma unroll
    for (int k = 0; k < kStates; ++k) {
      const bool given = k < Cell::kGradStates && p.dlast != nullptr;
      d[k] = V(given ? static_cast<const float*>(p.dlast)[k * p.S * ND + state] : 0.0f);
    }
    for (int t = column.length + column.padding - 1; t >= column.length; --t) {
      Loaded<Cell, IO> none;
      none.runs = none.resets = false;
      step<Cell, IO, V>(p, none, column.row + t, at, ND, d, dbias);
    }
    for (int last = column.length - 1; last >= 0; last -= kAhead) {
      Loaded<Cell, IO> ahead[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) load(ahead[i], p, column, last - i, at, ND);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (last < i) break;
        step<Cell, IO, V>(p, ahead[i], column.row + last - i, at, ND, d, dbias);
      }
    }
#pragma unroll
    for (int k = 0; k < kStates; ++k) {
      static_cast<float*>(p.dstate)[k * p.S * ND + state] = to_float(d[k]);
    }
  }
#pragma unroll
  for (int row = 0; row < kBias; ++row) sums[row][mine][lane] = dbias[row];
  __syncthreads();
  for (int row = mine; row < kBias && at < ND; row += kSequences) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kSequences; ++i) sum += sums[row][i][lane];
    static_cast<float*>(p.dbias_partial)[(tile * kBias + row) * ND + at] = sum;
  }
}

}  // namespace flashcell::cuda::cut
