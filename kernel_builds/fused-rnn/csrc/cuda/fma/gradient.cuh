// One cell of the backward pass of the fma engine, for blocks that work alone and for clusters.
#pragma once
#include "tile.cuh"

namespace flashcell::cuda {

template <typename Cell>
struct FmaGradient {
  using V = Full;
  static constexpr int G = Cell::kGates, K = Cell::kStates, R = Cell::kBias, kKept = Cell::kSaved;

  // What a step writes for a cell.
  struct Output {
    float dx[G], dr[G];
    int mark = 0;

    DEVICE void write(const BackwardParams& p, int64_t row, int at, int width) const {
      if (!(mark & (kFmaRuns | kFmaZeros))) return;
      const int64_t to = row * G + at;
#pragma unroll
      for (int g = 0; g < G; ++g) {
        ((float*)p.dx)[to + int64_t(g) * width] = dx[g];
        if constexpr (Cell::kSplitGrad) ((float*)p.dr)[to + int64_t(g) * width] = dr[g];
      }
    }
  };

  // The gradient that reaches state k from outside. `at` is the offset of a cell in a row of units.
  static DEVICE float last(const BackwardParams& p, const FmaPlace& place, bool exists, int k,
                           int at, int width) {
    if (p.dlast == nullptr || k >= Cell::kGradStates || !exists) return 0;
    return ((const float*)p.dlast)[(k * p.S + place.index) * width + at];
  }

  // Completes the gradient d of the states before a step with the product, then runs the step
  // before it, with mark `mark`. `later` is the mark of the first of the two. `inputs` are the
  // saved values and dh of the cell, `stride` floats apart.
  static DEVICE void run(const BackwardParams& p, int later, int mark, float product,
                         const float* inputs, int stride, float (&d)[K], Output& output,
                         float (&d_bias)[R]) {
    enter(p, later, product, d);
    V after[K], kept[kKept], dx[G], dr[G];
#pragma unroll
    for (int v = 0; v < kKept; ++v) kept[v] = V(inputs[v * stride]);
#pragma unroll
    for (int k = 0; k < K; ++k) after[k] = V(d[k]);
    after[0] = after[0] + V(inputs[kKept * stride]);
    Cell::backward(kept, after, dx, dr);
    const bool runs = mark & kFmaRuns;
#pragma unroll
    for (int k = 0; k < K; ++k) d[k] = runs ? to_float(after[k]) : d[k];
    output.mark = mark;
#pragma unroll
    for (int g = 0; g < G; ++g) {
      output.dx[g] = runs ? to_float(dx[g]) : 0.0f, output.dr[g] = runs ? to_float(dr[g]) : 0.0f;
      d_bias[g] += output.dx[g];
    }
    if constexpr (R > G) d_bias[R - 1] += output.dr[G - 1];
  }
  static DEVICE void enter(const BackwardParams& p, int later, float product, float (&d)[K]) {
    const bool cleared = later & kFmaResets, flows = !cleared && later & kFmaRuns;
#pragma unroll
    for (int k = 0; k < K; ++k) d[k] = cleared ? 0.0f : d[k];
    if (flows) d[0] += clip(product, float(p.grad_clip));
  }

  // Writes zeros for the steps after the last, from step `steps` on, and the gradient of the
  // initial states.
  static DEVICE void finish(const BackwardParams& p, const FmaPlace& place, int steps, int at,
                            int width, const float (&d)[K]) {
    for (int t = steps; t < place.length + place.padding; ++t) {
      Output zeros{};
      zeros.mark = kFmaZeros;
      zeros.write(p, place.output + int64_t(t) * width, at, width);
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
      ((float*)p.dstate)[(k * p.S + place.index) * width + at] =
          k < Cell::kGradStates ? d[k] : 0.0f;
    }
  }

  // The ring of saved values and dh, from step t on; `at` is the offset of the block's first unit.
  template <typename Ring>
  static DEVICE Ring ring(const BackwardParams& p, const typename Ring::Tile& tile, int units,
                          int t, int at) {
    const int width = int(p.N * p.D);
    return Ring(
        tile, units, t,
        [&](int row) {
          return row < kKept ? (const float*)p.saved + row * width + at : (const float*)p.dh + at;
        },
        [&](int row) { return row < kKept ? kKept * width : width; },
        [](int row) { return row < kKept ? kKept : 1; });
  }
};

}  // namespace flashcell::cuda
