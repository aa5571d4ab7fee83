// The forward pass of the fma engine; launch.cuh describes the engine.
#pragma once
#include "exchange.cuh"
#include "product.cuh"
#include "tile.cuh"

namespace flashcell::cuda {

// kWidth is D rounded up; kSequences is the number of sequences of a pass.
template <typename Cell, int kWidth, int kSequences>
struct FmaForward {
  using V = Full;
  static constexpr int G = Cell::kGates, K = Cell::kStates, R = Cell::kBias, kKept = Cell::kSaved;
  static constexpr fma::Division kDivision = fma::forward_division(G, kWidth);
  static constexpr int kUnits = kDivision.units, kLanes = kDivision.lanes;
  static constexpr int kThreads = kDivision.threads(fma::most_units(G, kWidth));
  static constexpr bool kCluster = fma::uses_cluster(G, kWidth);
  static constexpr bool kOne = kSequences == 1, kTwo = kSequences == 2;
  static constexpr int kCopies = int(fma::divide_up(kSequences * G * kUnits, 4 * kLanes));
  using Product = FmaProduct<G, kUnits, kLanes, kDivision.chunks(), kSequences>;
  using Tile = FmaTile<kSequences, 1>;
  using Ring = FmaRing<G, kSequences, 1, kCopies>;
  static constexpr int kResident = fma::resident(kWidth);
  // Saves registers (product.cuh): otherwise an SM would hold one block of 64 units instead of two.
  static constexpr bool kLate = kWidth == 64;
  static constexpr int kOwned = Product::kOwned;

  // What a step writes for a cell: h, h before the step, and the saved values.
  struct Output {
    float values[2 + kKept];
    int mark = 0;

    DEVICE void write(const ForwardParams& p, int64_t row, int at, int width) const {
      if (!(mark & (kFmaRuns | kFmaZeros))) return;
      const bool runs = mark & kFmaRuns;
      const int64_t to = row + at;
      ((float*)p.h)[to] = runs ? values[0] : 0.0f;
      if (p.saved == nullptr) return;
      ((float*)p.h_prev)[to] = runs ? values[1] : 0.0f;
      float* saved = (float*)p.saved + row * kKept + at;
#pragma unroll
      for (int v = 0; v < kKept; ++v) saved[int64_t(v) * width] = runs ? values[2 + v] : 0.0f;
    }
  };

  static DEVICE void run(const ForwardParams& p, const fma::Memory& m, float* memory) {
    const int D = int(p.D), threads = blockDim.x, group = threadIdx.x / kLanes;
    const int rank = kCluster ? blockIdx.x % m.members : 0, first_unit = rank * m.units;
    const int units = min(m.units, D - first_unit);  // of this block
    const int64_t index = blockIdx.x / (kCluster ? m.members : 1);
    const int64_t head = p.first_head + index % p.heads, first = index / p.heads * m.tile;
    const int width = int(p.N * p.D), at = int(head * p.D) + first_unit;
    const int steps = longest(p, first, m.tile);

    Tile tile(p, m, memory, first, p.x_batch);
    const int sequences = int(min(int64_t(m.tile), p.S - first));
    const FmaExchange<kCluster> exchange(m, memory, threads, sequences * D);
    for (int i = threadIdx.x; i < 2 * m.tile * m.row; i += threads) memory[m.operand + i] = 0;
    const Product product(m.operand, m.row, [&](int depth, int u, int g) {
      const int unit = group * kUnits + u;
      const float* row =
          (const float*)p.weight + ((g * p.N + head) * p.D + first_unit + unit) * p.D;
      return unit < units && depth < D ? row[depth] : 0.0f;
    });
    float bias[kOwned][R];
#pragma unroll
    for (int j = 0; j < kOwned; ++j) {
      const int unit = group * kUnits + Product::unit(j);
#pragma unroll
      for (int row = 0; row < R; ++row) {
        const bool given = p.bias != nullptr && unit < units;
        bias[j][row] = given ? ((const float*)p.bias)[row * width + at + unit] : 0.0f;
      }
    }
    __syncthreads();
    Ring ring(
        tile, units, 0,
        [&](int g) { return (const float*)p.x + head * p.x_head + g * p.x_gate + first_unit; },
        [&](int) { return p.x_time; }, [](int) { return 1; });
    tile.begin(p, 0);

    // Calls a function for every cell of this thread: its number, sequence, unit and whether it
    // exists.
    const auto of_pass = [&](int pass, auto function) {
#pragma unroll
      for (int j = 0; j < kOwned; ++j) {
        const int s = pass * kSequences + Product::sequence(j);
        const int unit = group * kUnits + Product::unit(j);
        function(j, s, unit, unit < units && first + s < p.S);
      }
    };
    const int passes = kOne ? 1 : m.tile / kSequences;
    const auto operand_at = [&](int t, int s, int unit) -> float& {
      return memory[m.operand + ((t & 1) * m.tile + s) * m.row + first_unit + unit];
    };
    // The states between steps: of one sequence in registers, of several in shared memory, where h
    // is the operand.
    float kept[kOwned][K];
    const auto state_at = [&](int t, int pass, int j, int k) -> float& {
      if constexpr (kOne) {
        return kept[j][k];
      } else {
        if (k == 0) {
          return operand_at(t, pass * kSequences + Product::sequence(j),
                            group * kUnits + Product::unit(j));
        }
        const int cell = (pass * kOwned + j) * (K - 1) + k - 1;
        return memory[m.states + cell * threads + threadIdx.x];
      }
    };
    // Stores h before step t for every block that reads it: exchange t.
    const auto send = [&](int t, int s, int unit, bool exists, float h) {
      float& here = operand_at(t, s, unit);
      if constexpr (kCluster) {
        if (!exists) return;
        for (int to = Product::sharer(); to < m.members; to += Product::kSharers) {
          exchange.send(t, exchange.there(&here, to), exchange.barrier_of(to), h);
        }
      } else if (exists && Product::leads()) {
        here = h;
      }
    };
    // Waits for the inputs of step t and for h before it.
    const auto receive = [&](int t) {
      Ring::wait();
      if constexpr (kCluster) {
        exchange.arrive(t), exchange.wait(t);
      } else {
        __syncthreads();
      }
    };
    if constexpr (kCluster) {
      cluster_sync();
    } else {
      __syncthreads();
    }
    for (int pass = 0; pass < passes; ++pass) {
      of_pass(pass, [&](int j, int s, int unit, bool exists) {
        const bool given = p.initial != nullptr && exists && !(tile.mark(0, 0, s) & kFmaResets);
        const int64_t from = tile.place(s).index * int64_t(width) + at + unit;
#pragma unroll
        for (int k = 0; k < K; ++k) {
          const float value = given ? ((const float*)p.initial)[k * p.S * width + from] : 0.0f;
          if (k == 0) send(0, s, unit, exists, value);
          if (k > 0 || kOne) state_at(0, pass, j, k) = value;
        }
      });
    }
    receive(0);

    Output output[kOwned];
    const auto write = [&](int t, int j, int s, int unit, bool exists) {
      const int64_t row = tile.place(s).output + int64_t(t) * width;
      if (exists && Product::leads()) output[j].write(p, row, at + unit, width);
    };
    for (int t = 0; t < steps; ++t) {
#pragma unroll 1
      for (int pass = 0; pass < passes; ++pass) {
        typename Product::Sums sums;
        product.template run<kLate>(memory, ((t & 1) * m.tile + pass * kSequences) * m.row, sums,
                                    [&] {
                                      if (pass > 0) return;
                                      tile.load(p, t), ring.start_after(t);
                                      if constexpr (kOne) {
                                        of_pass(0, [&](int j, int s, int unit, bool exists) {
                                          write(t - 1, j, s, unit, exists);
                                        });
                                      }
                                    });
        of_pass(pass, [&](int j, int s, int unit, bool exists) {
          V x[G], r[G], state[K], next[K], saved[kKept];
          const float* inputs = memory + ring.stage(t, s) + unit;
#pragma unroll
          for (int g = 0; g < G; ++g) {
            x[g] = V(inputs[g * m.units] + bias[j][g]), r[g] = V(sums[j][g]);
          }
          if constexpr (R > G) r[G - 1] += V(bias[j][R - 1]);
#pragma unroll
          for (int k = 0; k < K; ++k) state[k] = V(state_at(t, pass, j, k));
          Cell::forward(x, r, state, next, saved);
          const int mark = tile.mark(0, t, s);
          const bool runs = mark & kFmaRuns, clears = tile.mark(1, t, s) & kFmaResets;
          const auto after = [&](int k) {
            return clears ? 0.0f : to_float(select(runs, next[k], state[k]));
          };
          send(t + 1, s, unit, exists, after(0));
          output[j].mark = mark;
          output[j].values[0] = to_float(next[0]), output[j].values[1] = to_float(state[0]);
#pragma unroll
          for (int v = 0; v < kKept; ++v) output[j].values[2 + v] = to_float(saved[v]);
#pragma unroll
          for (int k = kOne ? 0 : 1; k < K; ++k) state_at(t, pass, j, k) = after(k);
          if constexpr (!kOne) write(t, j, s, unit, exists);
        });
      }
      tile.advance(t);
      receive(t + 1);
    }

    for (int pass = 0; pass < passes; ++pass) {
      of_pass(pass, [&](int j, int s, int unit, bool exists) {
        if (!exists || !Product::leads()) return;
        if (kOne && steps > 0) write(steps - 1, j, s, unit, exists);
        const FmaPlace& place = tile.place(s);
        for (int t = steps; t < place.length + place.padding; ++t) {
          Output zeros{};
          zeros.mark = kFmaZeros;
          zeros.write(p, place.output + int64_t(t) * width, at + unit, width);
        }
#pragma unroll
        for (int k = 0; k < K; ++k) {
          const int64_t to = (k * p.S + place.index) * width + at + unit;
          ((float*)p.last)[to] = state_at(steps, pass, j, k);
        }
      });
    }
  }
};

}  // namespace flashcell::cuda
