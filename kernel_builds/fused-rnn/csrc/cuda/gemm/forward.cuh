// The kernel that computes one forward step of the gemm engine, apart from the matrix product. A
// thread computes four neighbouring units of a sequence. The states are kept in `last`, in fp32,
// between launches.
#pragma once
#include "../sequence.cuh"
#include "plan.h"
#include "step.cuh"

namespace flashcell::cuda::gemm {

// Rounds the initial h to the dtype of x, as the operand of the first matrix product.
template <typename IO>
__global__ void __launch_bounds__(kSequences* kQuads) first_operand_kernel(
    const __grid_constant__ ForwardParams p, const Step step) {
  const int64_t s = int64_t(blockIdx.y) * kSequences + threadIdx.x / kQuads;
  const int at = (blockIdx.x * kQuads + threadIdx.x % kQuads) * kQuad;
  if (s >= p.S || at >= step.ND) return;
  float h[kQuad];
  load_each(h, static_cast<const float*>(p.initial) + Column(p, s).index * step.row + at);
  step.template keep<IO>(s, at, 1, 0, h);
}

// Adds the bias of a quad's gates to x; of a gate with two biases, to `own` the one of the product.
template <typename Cell, typename IO>
DEVICE void add_bias(float (&x)[Cell::kGates][kQuad], float (&own)[kQuad], const ForwardParams& p,
                     int64_t width, int at) {
  if (p.bias == nullptr) return;
#pragma unroll
  for (int row = 0; row < Cell::kBias; ++row) {
    float bias[kQuad];
    if (p.bias_is_io) {
      load_any(bias, static_cast<const IO*>(p.bias) + row * width + at);
    } else {
      load_any(bias, static_cast<const float*>(p.bias) + row * width + at);
    }
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if (row < Cell::kGates) {
        x[row][i] += bias[i];
      } else {
        own[i] = bias[i];
      }
    }
  }
}

// So many thread blocks on an SM keep enough loads in flight. Without this limit the compiler takes
// so many registers that only two fit.
template <typename Cell, typename IO, typename V>
__global__ void __launch_bounds__(kSequences* kQuads, Cell::kStates > 2 ? 3 : 4)
forward_cells_kernel(const __grid_constant__ ForwardParams p, const Step step) {
  constexpr int kGates = Cell::kGates, kStates = Cell::kStates, kSaved = Cell::kSaved;
  const int64_t s = int64_t(blockIdx.y) * kSequences + threadIdx.x / kQuads;
  const int at = (blockIdx.x * kQuads + threadIdx.x % kQuads) * kQuad;
  if (s >= p.S || at >= step.ND) return;
  const int head = at / step.D, unit = at - head * step.D;
  const Column column(p, s, p.x_batch);
  const int t = step.time();
  const bool in_time = column.runs(t), held = column.holds(p, t), runs = in_time && !held;
  const bool carries = in_time || (t == 0 && column.length == 0);  // writes states
  const bool zeros = held || (!in_time && t < column.length + column.padding);
  if (!carries && !zeros) return step.wait();
  const int64_t row = column.row + t, to = row * step.row + at;
  IO* saved = static_cast<IO*>(p.saved) + row * kSaved * step.row + at;

  // What precedes the product is read while it ends. It was written before the product began.
  // The h of a cell that reads it in the product alone is the last output.
  const bool keeps_h = kReadsH<Cell> || p.hold != nullptr;
  float states[kStates][kQuad] = {};
  if (carries && !column.resets(p, t)) {
    const int64_t from = column.index * step.row + at;
#pragma unroll
    for (int k = 0; k < kStates; ++k) {
      if (t > 0 && k == 0 && !keeps_h) {
        if (p.h_prev != nullptr) load_quad(states[0], static_cast<const IO*>(p.h) + to - step.row);
      } else if (t > 0) {
        load_quad(states[k], static_cast<const float*>(p.last) + from + k * step.states);
      } else if (p.initial != nullptr) {
        load_each(states[k], static_cast<const float*>(p.initial) + from + k * step.states);
      }
    }
  }
  float x[kGates][kQuad], own[kQuad] = {};
  if (runs) {
    const IO* from =
        static_cast<const IO*>(p.x) + column.x_offset + t * p.x_time + head * p.x_head + unit;
#pragma unroll
    for (int g = 0; g < kGates; ++g) load_quad_once(x[g], from + g * p.x_gate);
    add_bias<Cell, IO>(x, own, p, step.row, at);
  }
  step.wait();
  if (runs) {
    if (p.h_prev != nullptr) store_quad(static_cast<IO*>(p.h_prev) + to, states[0]);
    float product[kGates][kQuad] = {};
    if (step.has_product && !column.resets(p, t)) {
#pragma unroll
      for (int g = 0; g < kGates; ++g) step.add_product(product[g], s, at, kGates, g);
    }
    float values[kSaved][kQuad];
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      V xs[kGates], rs[kGates], state[kStates], next[kStates], kept[kSaved];
#pragma unroll
      for (int g = 0; g < kGates; ++g) xs[g] = V(x[g][i]), rs[g] = V(product[g][i]);
      if (Cell::kBias > kGates) rs[kGates - 1] += V(own[i]);
#pragma unroll
      for (int k = 0; k < kStates; ++k) state[k] = V(states[k][i]);
      Cell::forward(xs, rs, state, next, kept);
#pragma unroll
      for (int k = 0; k < kStates; ++k) states[k][i] = to_float(next[k]);
#pragma unroll
      for (int v = 0; v < kSaved; ++v) values[v][i] = to_float(kept[v]);
    }
    if (p.saved != nullptr) {
#pragma unroll
      for (int v = 0; v < kSaved; ++v) store_quad(saved + int64_t(v) * step.row, values[v]);
    }
    store_quad(static_cast<IO*>(p.h) + to, states[0]);
  } else if (zeros) {
    store_zeros(static_cast<IO*>(p.h) + to);
    if (p.h_prev != nullptr) store_zeros(static_cast<IO*>(p.h_prev) + to);
    for (int v = 0; p.saved != nullptr && v < kSaved; ++v) {
      store_zeros(saved + int64_t(v) * step.row);
    }
  }
  if (!carries) return;
  float* last = static_cast<float*>(p.last) + column.index * step.row + at;
#pragma unroll
  for (int k = 0; k < kStates; ++k) {
    if (k > 0 || keeps_h || t >= column.length - 1) store_quad(last + k * step.states, states[k]);
  }
  if (t + 1 < p.T) step.template keep<IO>(s, at, 1, 0, states[0]);
}

}  // namespace flashcell::cuda::gemm
