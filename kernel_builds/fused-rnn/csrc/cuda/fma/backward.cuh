// The backward pass of the fma engine for heads that fit in one thread block; launch.cuh describes
// the engine.
#pragma once
#include "gradient.cuh"
#include "product.cuh"

namespace flashcell::cuda {

// The product is with the transposed weight: its depth is (gate, unit), and the operand is dr of
// the step before it, which is the next one in time.
template <typename Cell, int kWidth, int kSequences>
struct FmaBackward {
  static constexpr int G = Cell::kGates, K = Cell::kStates, R = Cell::kBias;
  static constexpr fma::Division kDivision = fma::backward_division(G, kWidth);
  static constexpr int kUnits = kDivision.units, kLanes = kDivision.lanes;
  static constexpr int kThreads = kDivision.threads(kWidth), kInputs = Cell::kSaved + 1;
  static constexpr int kCopies = int(fma::divide_up(kSequences * kInputs * kUnits, 4 * kLanes));
  static constexpr bool kOne = kSequences == 1, kTwo = kSequences == 2, kCluster = false;
  using Product = FmaProduct<1, kUnits, kLanes, kDivision.chunks(), kSequences>;
  using Tile = FmaTile<kSequences, -1>;
  using Ring = FmaRing<kInputs, kSequences, -1, kCopies>;
  using Gradient = FmaGradient<Cell>;
  static constexpr int kResident = fma::resident(kWidth);
  static constexpr bool kLate = kWidth == 64;  // as in the forward pass
  static constexpr int kOwned = Product::kOwned;

  static DEVICE void run(const BackwardParams& p, const fma::Memory& m, float* memory) {
    const int D = int(p.D), threads = blockDim.x, group = threadIdx.x / kLanes;
    const int64_t head = p.first_head + blockIdx.x % p.heads;
    const int64_t index = blockIdx.x / p.heads, first = index * m.tile;
    const int width = int(p.N * p.D), at = int(head * p.D);
    const int steps = longest(p, first, m.tile), passes = kOne ? 1 : m.tile / kSequences;

    Tile tile(p, m, memory, first, 0);
    for (int i = threadIdx.x; i < 2 * m.tile * m.row; i += threads) memory[m.operand + i] = 0;
    const Product product(m.operand, m.row, [&](int depth, int u, int) {
      const int unit = group * kUnits + u, g = depth / D, from = depth % D;
      const float* column = (const float*)p.weight + (g * p.N + head) * p.D * p.D + unit;
      return unit < D && g < G ? column[from * p.D] : 0.0f;
    });
    __syncthreads();
    Ring ring = Gradient::template ring<Ring>(p, tile, D, steps - 1, at);
    tile.begin(p, steps);

    // Calls a function for every cell of this thread: its number, sequence, unit and whether it
    // exists.
    const auto of_pass = [&](int pass, auto function) {
#pragma unroll
      for (int j = 0; j < kOwned; ++j) {
        const int s = pass * kSequences + Product::sequence(j);
        const int unit = group * kUnits + Product::unit(j);
        function(j, s, unit, unit < D && first + s < p.S);
      }
    };
    // The gradients of the states between steps: of one sequence in registers, of several in shared
    // memory.
    float own[kOwned][K];
    const auto gradient_at = [&](int pass, int j, int k) -> float& {
      if constexpr (kOne) return own[j][k];
      return memory[m.states + ((pass * kOwned + j) * K + k) * threads + threadIdx.x];
    };
    for (int pass = 0; pass < passes; ++pass) {
      of_pass(pass, [&](int j, int s, int unit, bool exists) {
#pragma unroll
        for (int k = 0; k < K; ++k) {
          gradient_at(pass, j, k) = Gradient::last(p, tile.place(s), exists, k, at + unit, width);
        }
      });
    }
    float d_bias[kOwned][R] = {};
    typename Gradient::Output output[kOwned];
    const auto write = [&](int t, int j, int s, int unit, bool exists) {
      const int64_t row = tile.place(s).output + int64_t(t) * width;
      if (exists && Product::leads()) output[j].write(p, row, at + unit, width);
    };
    Ring::wait();
    __syncthreads();

    for (int t = steps - 1; t >= 0; --t) {
#pragma unroll 1
      for (int pass = 0; pass < passes; ++pass) {
        typename Product::Sums sums;
        product.template run<kLate>(memory, (((t + 1) & 1) * m.tile + pass * kSequences) * m.row,
                                    sums, [&] {
                                      if (pass > 0) return;
                                      tile.load(p, t + 1), ring.start_after(t);
                                      if constexpr (kOne) {
                                        of_pass(0, [&](int j, int s, int unit, bool exists) {
                                          write(t + 1, j, s, unit, exists);
                                        });
                                      }
                                    });
        of_pass(pass, [&](int j, int s, int unit, bool exists) {
          float d[K];
#pragma unroll
          for (int k = 0; k < K; ++k) d[k] = gradient_at(pass, j, k);
          Gradient::run(p, tile.mark(0, t + 1, s), tile.mark(1, t + 1, s), sums[j][0],
                        memory + ring.stage(t, s) + unit, D, d, output[j], d_bias[j]);
          float* operand = memory + m.operand + ((t & 1) * m.tile + s) * m.row + unit;
          if (exists && Product::leads()) {
#pragma unroll
            for (int g = 0; g < G; ++g) operand[g * D] = output[j].dr[g];
          }
#pragma unroll
          for (int k = 0; k < K; ++k) gradient_at(pass, j, k) = d[k];
          if constexpr (!kOne) write(t, j, s, unit, exists);
        });
      }
      tile.advance(t + 1);
      Ring::wait();
      __syncthreads();
    }

    for (int pass = 0; pass < passes; ++pass) {
      typename Product::Sums sums;
      product.template run<kLate>(memory, pass * kSequences * m.row, sums, [] {});
      of_pass(pass, [&](int j, int s, int unit, bool exists) {
        float d[K];
#pragma unroll
        for (int k = 0; k < K; ++k) d[k] = gradient_at(pass, j, k);
        if (steps > 0) Gradient::enter(p, tile.mark(0, 0, s), sums[j][0], d);
        if (kOne && steps > 0) write(0, j, s, unit, exists);
        if (exists && Product::leads()) {
          Gradient::finish(p, tile.place(s), steps, at + unit, width, d);
        }
      });
    }
    // Adds up the sequences of a unit, which are kApart lanes apart.
    constexpr int kApart = kUnits * Product::kSharers / kOwned;
#pragma unroll
    for (int j = 0; j < kOwned; ++j) {
      const int unit = group * kUnits + Product::unit(j);
#pragma unroll
      for (int row = 0; row < R; ++row) {
#pragma unroll
        for (int mask = kApart; mask < kLanes; mask *= 2) {
          d_bias[j][row] += __shfl_xor_sync(~0u, d_bias[j][row], mask);
        }
        if (Product::sequence(j) == 0 && Product::leads() && unit < D) {
          ((float*)p.dbias_partial)[(index * R + row) * width + at + unit] = d_bias[j][row];
        }
      }
    }
  }
};

}  // namespace flashcell::cuda
