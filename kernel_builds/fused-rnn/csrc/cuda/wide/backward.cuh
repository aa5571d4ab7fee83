// The backward pass of the wide engine; launch.cuh describes it.
#pragma once
#include "../fma/gradient.cuh"
#include "block.cuh"
#include "product.cuh"

namespace flashcell::cuda {

template <typename Cell, int kSequences>
struct WideBackward {
  using Params = BackwardParams;
  static constexpr int G = Cell::kGates, K = Cell::kStates, R = Cell::kBias, kKept = Cell::kSaved;
  using Product = WideProduct<wide::kMostRows, kSequences>;
  using Tile = FmaTile<kSequences, -1>;
  using Gradient = FmaGradient<Cell>;

  // The gradient that the thread blocks exchange.
  static DEVICE float* exchanged(const BackwardParams& p) {
    return (float*)(Cell::kSplitGrad ? p.dr : p.dx);
  }

  // Writes the gradients of a step of a cell; a step that is held writes zeros.
  static DEVICE void write(const BackwardParams& p, int64_t row, int at, int width,
                           const typename Gradient::Output& output) {
    const int64_t to = row * G * width + at;
#pragma unroll
    for (int g = 0; g < G; ++g) {
      const uint32_t word = min(__float_as_uint(output.dr[g]), kUnwritten - 1);
      store_relaxed(exchanged(p) + to + int64_t(g) * width, word);
    }
    if constexpr (Cell::kSplitGrad) {
#pragma unroll
      for (int g = 0; g < G; ++g) ((float*)p.dx)[to + int64_t(g) * width] = output.dx[g];
    }
  }

  // `transposed` is [heads, D, G, D]: the weight by the unit that it reads; null if all is held.
  static DEVICE void run(const BackwardParams& p, const wide::Memory& m, int first_head,
                         const float* transposed, float* memory) {
    const WideBlock block(p, m, first_head);
    const int D = int(p.D), width = int(p.N * p.D), head_at = block.head * D;
    const int at = head_at + block.first_unit + block.unit;  // of the thread's cell in a row
    const int sequences = block.sequences(p, m);
    const int steps = longest(p, block.first, sequences);

    Tile tile(p, m, memory, block.first, 0);
    load_wide_weights<true>(memory + m.weights, m, [&](int row, int i) {
      const int unit = block.first_unit + min(row, block.units - 1), gate = i / D;
      const int64_t from = (gate * p.N + block.head) * p.D + (i - gate * D);
      return ((const float*)p.weight)[from * p.D + unit];
    });
    __syncthreads();
    tile.begin(p, steps);
    const auto gradient_at = [&](int s, int k) -> float& {
      return memory[m.states + (k * m.tile + s) * m.units + block.unit];
    };
    for (int s = block.sequence; block.runs && s < sequences; s += kSequences) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        gradient_at(s, k) = Gradient::last(p, tile.place(s), true, k, at, width);
      }
    }
    __syncthreads();

    Product product(m, memory, D, width);
    // Multiplies dr of step t + 1 for the sequences of a pass.
    const auto multiply = [&](int t, int begin) {
      product.run(
          min(kSequences, sequences - begin),
          [&](int i) {
            const int later = tile.mark(0, t + 1, begin + i);
            const bool flows = later & kFmaRuns && !(later & kFmaResets);
            return flows ? tile.place(begin + i).row + t + 1 : kFromZeros;
          },
          [&](int64_t row) { return exchanged(p) + row * G * width + head_at; },
          [](int, int) { return 0.0f; },
          [&](int r) {
            const int unit = block.first_unit + min(r, block.units - 1);
            return transposed + ((block.head - p.first_head) * p.D + unit) * G * p.D;
          });
    };
    float d_bias[R] = {};
    for (int t = steps - 1; t >= 0; --t) {
      tile.load(p, t + 1);
#pragma unroll 1
      for (int begin = 0; begin < sequences; begin += kSequences) {
        const int s = begin + block.sequence;
        const bool exists = block.runs && s < sequences;
        const FmaPlace& place = tile.place(exists ? s : 0);
        const int64_t row = place.row + t;
        const bool loads = exists && t < place.length;
        const float* saved = (const float*)p.saved + row * kKept * width + at;
        float inputs[kKept + 1];
#pragma unroll
        for (int v = 0; v < kKept; ++v) inputs[v] = load_ahead(loads, saved + int64_t(v) * width);
        inputs[kKept] = load_ahead(loads, (const float*)p.dh + row * width + at);
        multiply(t, begin);
        if (begin == 0) tile.advance(t + 1);
        if (!exists) continue;
        float d[K];
#pragma unroll
        for (int k = 0; k < K; ++k) d[k] = gradient_at(s, k);
        typename Gradient::Output output;
        const int mark = tile.mark(1, t + 1, s);
        float sum[1];
        product.sum(block.unit, block.sequence, sum);
        Gradient::run(p, tile.mark(0, t + 1, s), mark, sum[0], inputs, 1, d, output, d_bias);
        if (mark & (kFmaRuns | kFmaZeros)) write(p, row, at, width, output);
#pragma unroll
        for (int k = 0; k < K; ++k) gradient_at(s, k) = d[k];
      }
    }
#pragma unroll 1
    for (int begin = 0; begin < sequences; begin += kSequences) {
      const int s = begin + block.sequence;
      if (steps > 0 && !p.skips_initial) multiply(-1, begin);
      if (!block.runs || s >= sequences) continue;
      float d[K];
#pragma unroll
      for (int k = 0; k < K; ++k) d[k] = gradient_at(s, k);
      if (steps > 0 && !p.skips_initial) {
        float sum[1];
        product.sum(block.unit, block.sequence, sum);
        Gradient::enter(p, tile.mark(0, 0, s), sum[0], d);
      }
      Gradient::finish(p, tile.place(s), steps, at, width, d);
    }
    // Adds up the sequences of a unit.
    __syncthreads();
    float* sums = memory + m.partial;
    if (block.runs) {
#pragma unroll
      for (int row = 0; row < R; ++row) {
        sums[(row * kSequences + block.sequence) * m.units + block.unit] = d_bias[row];
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < R * block.units; i += wide::kThreads) {
      const int row = i / block.units, unit = i % block.units;
      float sum = 0;
      for (int s = 0; s < kSequences; ++s) sum += sums[(row * kSequences + s) * m.units + unit];
      const int64_t to = (int64_t(block.index) * R + row) * width + head_at + block.first_unit;
      ((float*)p.dbias_partial)[to + unit] = sum;
    }
  }
};

}  // namespace flashcell::cuda
