// The backward pass of the fma engine for heads that are divided among the blocks of a cluster;
// launch.cuh describes the engine.
#pragma once
#include "exchange.cuh"
#include "gradient.cuh"
#include "product.cuh"

namespace flashcell::cuda {

// A block has dr of its own units and multiplies it by their columns of the weight. That gives a
// part of the gradient of every unit, which it sends to the unit's block. The block adds up the
// parts in the order of the members, and runs the cell.
template <typename Cell, int kWidth, int kSequences>
struct FmaClusterBackward {
  static constexpr int G = Cell::kGates, K = Cell::kStates, R = Cell::kBias;
  static constexpr fma::Division kDivision = fma::backward_division(G, kWidth);
  static constexpr int kUnits = kDivision.units, kLanes = kDivision.lanes;
  static constexpr int kThreads = kDivision.threads(kWidth), kInputs = Cell::kSaved + 1;
  // A thread runs the cells of one unit, of every kAtOnce-th sequence.
  static constexpr int kBlockUnits = fma::most_units(G, kWidth), kAtOnce = kThreads / kBlockUnits;
  static constexpr int kCopies =
      int(fma::divide_up(kSequences * kInputs * kBlockUnits, 4 * kThreads));
  using Product = FmaProduct<1, kUnits, kLanes, kDivision.chunks(), kSequences>;
  using Tile = FmaTile<kSequences, -1>;
  using Ring = FmaRing<kInputs, kSequences, -1, kCopies>;
  using Gradient = FmaGradient<Cell>;
  static constexpr int kResident = 1;
  static constexpr int kOwned = Product::kOwned;
  static constexpr bool kCluster = true, kTwo = kSequences == 2;

  static DEVICE void run(const BackwardParams& p, const fma::Memory& m, float* memory) {
    const int D = int(p.D), group = threadIdx.x / kLanes;
    const int rank = blockIdx.x % m.members, first_unit = rank * m.units;
    const int units = min(m.units, D - first_unit);  // of this block
    const int64_t cluster = blockIdx.x / m.members, index = cluster / p.heads;
    const int64_t head = p.first_head + cluster % p.heads, first = index * m.tile;
    const int width = int(p.N * p.D), at = int(head * p.D) + first_unit;
    const int steps = longest(p, first, m.tile);
    const int unit = threadIdx.x % kBlockUnits;

    Tile tile(p, m, memory, first, 0);
    for (int i = threadIdx.x; i < m.tile * m.row; i += kThreads) memory[m.operand + i] = 0;
    const Product product(m.operand, m.row, [&](int depth, int u, int) {
      const int to = group * kUnits + u, g = depth / kBlockUnits, from = depth % kBlockUnits;
      const float* row =
          (const float*)p.weight + ((g * p.N + head) * p.D + first_unit + from) * p.D;
      return to < D && g < G && from < units ? row[to] : 0.0f;
    });
    const int sequences = int(min(int64_t(m.tile), p.S - first));
    const FmaExchange<true> exchange(m, memory, 1, sequences * units * m.members);
    uint32_t inbox[kOwned],
        barrier[kOwned];  // where the parts of the lane's items go, for sequence 0
#pragma unroll
    for (int j = 0; j < kOwned; ++j) {
      const int to = group * kUnits + Product::unit(j);
      const int there = m.inbox + rank * m.tile * m.units + to % m.units;
      const int owner = min(to / m.units, m.members - 1);
      inbox[j] = exchange.there(memory + there, owner), barrier[j] = exchange.barrier_of(owner);
    }
    __syncthreads();
    Ring ring = Gradient::template ring<Ring>(p, tile, units, steps - 1, at);
    tile.begin(p, steps);

    // Calls a function for the sequence of every cell of this thread.
    const auto of_cells = [&](auto function) {
#pragma unroll 1
      for (int s = threadIdx.x / kBlockUnits; s < m.tile; s += kAtOnce) {
        if (unit < units && first + s < p.S) function(s);
      }
    };
    const auto gradient_at = [&](int s, int k) -> float& {
      return memory[m.states + (s * K + k) * kBlockUnits + unit];
    };
    of_cells([&](int s) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        gradient_at(s, k) = Gradient::last(p, tile.place(s), true, k, at + unit, width);
      }
    });
    float d_bias[R] = {};
    Ring::wait();
    cluster_sync();

    // Computes the products of dr of step t + 1 and exchanges their parts. The inbox of an even
    // exchange is not that of an odd one.
    const int parts = m.tile * m.units;  // floats of the inbox for each member
    const auto multiply = [&](int n, auto meanwhile) {
      if (threadIdx.x == 0) exchange.arrive(n);
#pragma unroll 1
      for (int s = 0; s < (kSequences == 1 ? 1 : m.tile); s += kSequences) {
        typename Product::Sums sums;
        product.template run<false>(memory, s * m.row, sums, [&] {
          if (s == 0) meanwhile();
        });
#pragma unroll
        for (int j = 0; j < kOwned; ++j) {
          const int of = s + Product::sequence(j);
          const int to = n % 2 * m.members * parts + of * m.units;
          if (Product::leads() && of < sequences && group * kUnits + Product::unit(j) < D) {
            exchange.send(n, inbox[j] + uint32_t(to * sizeof(float)), barrier[j], sums[j][0]);
          }
        }
      }
      exchange.wait(n);
      // What arrived came from other blocks too, so it does not say that all warps of this one have
      // read the operand, which the cells overwrite.
      __syncthreads();
    };
    const auto sum_of = [&](int n, int s) {
      const float* part = memory + m.inbox + n % 2 * m.members * parts + s * m.units + unit;
      float sum = part[0];
      for (int i = 1; i < m.members; ++i) sum += part[i * parts];
      return sum;
    };
    for (int t = steps - 1; t >= 0; --t) {
      const int n = steps - 1 - t;
      multiply(n, [&] { tile.load(p, t + 1), ring.start_after(t); });
      of_cells([&](int s) {
        float d[K];
#pragma unroll
        for (int k = 0; k < K; ++k) d[k] = gradient_at(s, k);
        typename Gradient::Output output;
        Gradient::run(p, tile.mark(0, t + 1, s), tile.mark(1, t + 1, s), sum_of(n, s),
                      memory + ring.stage(t, s) + unit, m.units, d, output, d_bias);
#pragma unroll
        for (int g = 0; g < G; ++g)
          memory[m.operand + s * m.row + g * kBlockUnits + unit] = output.dr[g];
#pragma unroll
        for (int k = 0; k < K; ++k) gradient_at(s, k) = d[k];
        output.write(p, tile.place(s).output + int64_t(t) * width, at + unit, width);
      });
      tile.advance(t + 1);
      Ring::wait();
      __syncthreads();
    }
    multiply(steps, [] {});
    of_cells([&](int s) {
      float d[K];
#pragma unroll
      for (int k = 0; k < K; ++k) d[k] = gradient_at(s, k);
      if (steps > 0) Gradient::enter(p, tile.mark(0, 0, s), sum_of(steps, s), d);
      Gradient::finish(p, tile.place(s), steps, at + unit, width, d);
    });
    // Adds up the sequences of a unit.
    float* sums = memory + m.ring;
#pragma unroll
    for (int row = 0; row < R; ++row) sums[row * kThreads + threadIdx.x] = d_bias[row];
    __syncthreads();
    for (int i = threadIdx.x; i < R * kBlockUnits; i += kThreads) {
      const int row = i / kBlockUnits;
      if (i % kBlockUnits >= units) continue;
      float sum = 0;
      for (int n = 0; n < kAtOnce; ++n)
        sum += sums[row * kThreads + n * kBlockUnits + i % kBlockUnits];
      ((float*)p.dbias_partial)[(index * R + row) * width + at + i % kBlockUnits] = sum;
    }
  }
};

}  // namespace flashcell::cuda
