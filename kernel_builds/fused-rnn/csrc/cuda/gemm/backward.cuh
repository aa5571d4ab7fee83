// The kernel that computes one backward step of the gemm engine, apart from the matrix product. A
// thread computes four neighbouring units of a sequence. The gradients of the states are kept in
// `dstate`, in fp32, between launches.
#pragma once
#include "../sequence.cuh"
#include "plan.h"
#include "step.cuh"

namespace flashcell::cuda::gemm {

// Adds this step's bias gradients, summed over the sequences of the thread block, to the block's
// row of dbias_partial. The row is loaded early, while the block waits for the product; the last
// time step, which runs first, begins with 0.
template <typename Cell>
struct BiasGradient {
  static constexpr int kUnits = kQuads * kQuad, kThreads = kSequences * kQuads;
  static constexpr int kOfThread = (Cell::kBias * kUnits + kThreads - 1) / kThreads;
  float* row;
  int ND, width;  // of the heads that run, and of a row
  float sums[kOfThread] = {};

  DEVICE BiasGradient(const BackwardParams& p, const Step& step, int t)
      : row(static_cast<float*>(p.dbias_partial) + int64_t(blockIdx.y) * Cell::kBias * step.row),
        ND(step.ND),
        width(step.row) {
    if (t == p.T - 1) return;
    for_each([&](int j, int at, int, int) { sums[j] = row[at]; });
  }
  // Calls body(j, place in the row, bias row, unit of the block) for the thread's elements.
  template <typename Body>
  DEVICE void for_each(Body body) const {
#pragma unroll
    for (int j = 0; j < kOfThread; ++j) {
      const int i = threadIdx.x + j * kThreads, bias = i / kUnits, unit = i % kUnits;
      const int at = int(blockIdx.x) * kUnits + unit;
      if (bias < Cell::kBias && at < ND) body(j, bias * width + at, bias, unit);
    }
  }
  DEVICE void add(const float (&given)[Cell::kBias][kSequences][kUnits]) {
    for_each([&](int j, int at, int bias, int unit) {
#pragma unroll
      for (int s = 0; s < kSequences; ++s) sums[j] += given[bias][s][unit];
      row[at] = sums[j];
    });
  }
};

// As many thread blocks run on an SM as without the row's elements, which are loaded early.
template <typename Cell, typename IO, typename V>
__global__ void __launch_bounds__(kSequences* kQuads, Cell::kStates > 2 ? 3 : 4)
backward_cells_kernel(const __grid_constant__ BackwardParams p, const Step step) {
  constexpr int kGates = Cell::kGates, kStates = Cell::kStates, kSaved = Cell::kSaved;
  __shared__ float sums[Cell::kBias][kSequences][kQuads * kQuad];
  const int place = threadIdx.x % kQuads, sequence = threadIdx.x / kQuads;
  const int64_t s = int64_t(blockIdx.y) * kSequences + sequence;
  const int at = (blockIdx.x * kQuads + place) * kQuad, t = step.time();
  const bool inside = s < p.S && at < step.ND;
  const Column column(p, inside ? s : p.S);
  const bool held = column.holds(p, t), runs = inside && column.runs(t) && !held;
  const bool carries = inside && t < column.length, clears = column.resets(p, t + 1);
  const bool zeros = inside && (held || (!carries && t >= 0 && t < column.length + column.padding));
  const int64_t row = column.row + t;
  IO* dx = static_cast<IO*>(p.dx) + row * kGates * step.row + at;
  IO* dr = static_cast<IO*>(p.dr) + row * kGates * step.row + at;

  // What precedes the product is read while it ends. It was written before the product began.
  // The gradient of an h that a cell reads in the product alone is that of the product.
  const bool keeps_dh = kReadsH<Cell> || p.hold != nullptr;
  float d[kStates][kQuad] = {}, dbias[Cell::kBias][kQuad] = {};
  float dh[kQuad], saved[kSaved][kQuad];
  if (runs) {
    load_quad_once(dh, static_cast<const IO*>(p.dh) + row * step.row + at);
    const IO* from = static_cast<const IO*>(p.saved) + row * kSaved * step.row + at;
#pragma unroll
    for (int v = 0; v < kSaved; ++v) load_quad_once(saved[v], from + int64_t(v) * step.row);
  }
  if (carries) {
    const bool ends = t == column.length - 1;
    if (!clears && !(ends && p.dlast == nullptr)) {
      const int64_t from = column.index * step.row + at;
#pragma unroll
      for (int k = 0; k < Cell::kGradStates; ++k) {
        if (ends) {
          load_each(d[k], static_cast<const float*>(p.dlast) + from + k * step.states);
        } else if (k > 0 || keeps_dh) {
          load_quad(d[k], static_cast<const float*>(p.dstate) + from + k * step.states);
        }
      }
    }
  }
  BiasGradient<Cell> bias_gradient(p, step, t);
  step.wait();
  if (carries) {
    if (column.runs(t + 1) && !clears && !column.holds(p, t + 1)) {
      float product[kQuad] = {};
      step.add_product(product, s, at, 1, 0);
#pragma unroll
      for (int i = 0; i < kQuad; ++i) d[0][i] += clip(product[i], float(p.grad_clip));
    }
  }
  if (runs) {
    float dxs[kGates][kQuad], drs[kGates][kQuad];
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      V kept[kSaved], states[kStates], xs[kGates], rs[kGates];
#pragma unroll
      for (int v = 0; v < kSaved; ++v) kept[v] = V(saved[v][i]);
#pragma unroll
      for (int k = 0; k < kStates; ++k) states[k] = V(d[k][i]);
      states[0] += V(dh[i]);
      Cell::backward(kept, states, xs, rs);
#pragma unroll
      for (int g = 0; g < kGates; ++g) {
        dxs[g][i] = dbias[g][i] = to_float(xs[g]), drs[g][i] = to_float(rs[g]);
      }
      if (Cell::kBias > kGates) dbias[Cell::kBias - 1][i] = to_float(rs[kGates - 1]);
#pragma unroll
      for (int k = 0; k < kStates; ++k) d[k][i] = to_float(states[k]);
    }
#pragma unroll
    for (int g = 0; g < kGates; ++g) {
      store_quad(dx + int64_t(g) * step.row, dxs[g]);
      if (Cell::kSplitGrad) store_quad(dr + int64_t(g) * step.row, drs[g]);
      step.template keep<IO>(s, at, kGates, g, drs[g]);
    }
  } else if (zeros) {
    for (int g = 0; g < kGates; ++g) {
      store_zeros(dx + int64_t(g) * step.row);
      if (Cell::kSplitGrad) store_zeros(dr + int64_t(g) * step.row);
    }
  }
  if (carries) {
    float* to = static_cast<float*>(p.dstate) + column.index * step.row + at;
#pragma unroll
    for (int k = 0; k < kStates; ++k) {
      if (k > 0 || keeps_dh || t < 0) store_quad(to + k * step.states, d[k]);
    }
  }
  if (t < 0 && p.T > 0) return;
#pragma unroll
  for (int row = 0; row < Cell::kBias; ++row) {
    store_quad(&sums[row][sequence][place * kQuad], dbias[row]);
  }
  __syncthreads();
  bias_gradient.add(sums);
}

}  // namespace flashcell::cuda::gemm
