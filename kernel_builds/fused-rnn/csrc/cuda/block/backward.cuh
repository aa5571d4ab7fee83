// The backward pass of the block engine; launch.cuh describes the engine.
#pragma once
#include "pipeline.cuh"

namespace flashcell::cuda {

// A warp owns 16 units: rows r and r + 8 of a tile of the transposed weight are units r and r + 8,
// and the depth of the product is (gate, unit).
template <typename Cell_, typename IO_, int kWidth, int kPerLane, bool kRagged>
struct BlockBackward : BlockSizes<Cell_, IO_, kWidth, 16, Cell_::kGates * kWidth> {
  using Sizes = BlockSizes<Cell_, IO_, kWidth, 16, Cell_::kGates * kWidth>;
  using Sizes::G, Sizes::K, Sizes::R, Sizes::kKept;
  using Sizes::kOperandBytes, Sizes::kRow, Sizes::kSteps, Sizes::kThreads;
  using typename Sizes::Cell, typename Sizes::IO, typename Sizes::V;
  static constexpr int kChains = 4;
  using Inputs = Pipeline<IO, kWidth, kKept + 1, kThreads, 2>;  // saved values, then dh
  // The rows written are dx, then dr if it differs.
  using Outputs = Outbox<IO, kWidth, Cell::kSplitGrad ? 2 * G : G, kThreads>;
  static constexpr int64_t planned_bytes(bool turing) {
    return block::backward_shared_bytes(kSizesOf<Cell>, kWidth, sizeof(IO), turing);
  }
  using Shared = typename Sizes::template Memory<Inputs, Outputs>;  // the operand is dr of a step

  static DEVICE void run(const BackwardParams& p, Shared& shared) {
    const int lane = threadIdx.x % 32, q = lane % 4, D = int(p.D);
    const int warp_unit = threadIdx.x / 32 * Sizes::kUnits, unit = warp_unit + lane / 4;
    const bool in_head[2] = {unit < D, unit + 8 < D};
    const int64_t head = p.first_head + blockIdx.x % p.heads;
    const int64_t tile = blockIdx.x / p.heads, first = tile * (4 * kPerLane);
    const int64_t ND = p.N * p.D, at = head * p.D + unit;
    const int steps = kRagged ? longest(p, first, 4 * kPerLane) : int(keep(uint32_t(p.T)));
    const float bound = float(p.grad_clip);

    const Column source(p, sequence_of<kPerLane>(p, first, Inputs::column()));
    Inputs inputs(shared.inputs, warp_unit, source.length, D, steps - 1, -1,
                  (const IO*)p.saved + source.row * kKept * ND + head * p.D, ND, kKept * ND,
                  (const IO*)p.dh + source.row * ND + head * p.D, ND);
    Outputs outputs(
        shared.outputs, warp_unit, source.length, D,
        [&](int row) {
          const int64_t from = ((source.row + steps - 1) * G + row % G) * ND + head * p.D;
          return (IO*)(row < G ? p.dx : p.dr) + from;
        },
        [&](int) { return -G * ND; });

    uint32_t a[kSteps][4];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int depth = (2 * i + j / 2) * IoTraits<IO>::kVector + q * IoTraits<IO>::kWord;
        const int g = depth / kWidth, from = depth % kWidth;
        const IO* column = (const IO*)p.weight + (g * p.N + head) * p.D * p.D + unit + j % 2 * 8;
        const bool inside = in_head[j % 2] && from < D;
        if constexpr (sizeof(IO) == 4) {
          a[i][j] = operand<IO>(inside ? *(const uint32_t*)(column + from * p.D) : 0);
        } else {
          const auto bits = [&](int row) { return *(const uint16_t*)(column + row * p.D); };
          a[i][j] = inside ? bits(from) | uint32_t(bits(from + 1)) << 16 : 0;
        }
      }
    }
    float d_bias[R][2] = {};
    V d[kPerLane][2][K];  // [column][unit]
    bool exists[kPerLane];
#pragma unroll
    for (int c = 0; c < kPerLane; ++c) {
      const int64_t s = sequence_of<kPerLane>(p, first, 2 * q + c);
      const Column column(p, s);
      exists[c] = s < p.S;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const bool given = p.dlast != nullptr && k < Cell::kGradStates && exists[c];
        const float* from = (const float*)p.dlast + (k * p.S + column.index) * ND + at;
        for (int u = 0; u < 2; ++u) d[c][u][k] = given && in_head[u] ? from[8 * u] : 0.0f;
      }
    }
    const Marks<kRagged> marks[2] = {{p, sequence_of<kPerLane>(p, first, 2 * q)},
                                     {p, sequence_of<kPerLane>(p, first, 2 * q + 1)}};
    for (int i = threadIdx.x; i < 2 * kColumns * kRow; i += kThreads) {
      (&shared.operand[0][0][0])[i] = from_float<IO>(0);
    }
    inputs.wait();
    __syncthreads();

    const uint32_t read =
        keep(shared_address(&shared.operand[0][lane % 8][lane / 8 * IoTraits<IO>::kVector]));
    const uint32_t write = keep(shared_address(&shared.operand[0][0][warp_unit]) +
                                tile_offset<IO, kRow>() * sizeof(IO));
    const auto multiply = [&](int t, float (&sums)[kChains][4]) {  // computes weight^T dr of step t
      const uint32_t rows = read + (t & 1) * kOperandBytes;
#pragma unroll
      for (int i = 0; i < kSteps; i += 2) {
        uint32_t b[4];
        load_vectors(b, rows + i * 32);
        mma<IO>(sums[i % kChains], a[i], b[0], b[1]);
        mma<IO>(sums[i % kChains + 1], a[i + 1], b[2], b[3]);
      }
    };
    // Adds the gradient that reaches the states before step t through step t.
    const auto enter = [&](int t, const float (&sums)[kChains][4]) {
#pragma unroll
      for (int c = 0; c < kPerLane; ++c) {
        const bool cleared = marks[c].resets(p, t), flows = !cleared && marks[c].runs(p, t);
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          const int e = 2 * u + c;
          const float product = (sums[0][e] + sums[1][e]) + (sums[2][e] + sums[3][e]);
          for (int k = 0; k < K; ++k) d[c][u][k] = cleared ? V(0) : d[c][u][k];
          d[c][u][0] = flows ? d[c][u][0] + V(clip(product, bound)) : d[c][u][0];
        }
      }
    };

    for (int t = steps - 1; t >= 0; --t) {
      ColumnPair<IO> in[2 * (kKept + 1)];  // [row][unit]
      inputs.load(in, t);
      float sums[kChains][4] = {};
      multiply(t + 1, sums);
      if (t + 1 < steps) outputs.send(t + 1);
      inputs.start(t - (Inputs::kStages - 1));
      enter(t + 1, sums);

      const bool runs[2] = {marks[0].runs(p, t), marks[1].runs(p, t)};
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        V dx[kPerLane][G], dr[kPerLane][G];
#pragma unroll
        for (int c = 0; c < kPerLane; ++c) {
          const auto value = [&](int row) {
            const float2 both = in[2 * row + u].floats();
            return V(c ? both.y : both.x);
          };
          V kept[kKept], after[K];
          for (int v = 0; v < kKept; ++v) kept[v] = value(v);
          for (int k = 0; k < K; ++k) after[k] = d[c][u][k];
          after[0] += value(kKept);
          Cell::backward(kept, after, dx[c], dr[c]);
          for (int k = 0; k < K; ++k) d[c][u][k] = select(runs[c], after[k], d[c][u][k]);
          // An empty column of a tile may hold any bits, even NaN: it must not reach the sum.
          const bool counts = runs[c] && exists[c];
          for (int g = 0; g < G; ++g) d_bias[g][u] += counts ? to_float(dx[c][g]) : 0.0f;
          if constexpr (R > G) d_bias[R - 1][u] += counts ? to_float(dr[c][G - 1]) : 0.0f;
        }
        const auto masked = [&](const V(&values)[kPerLane][G], int g) {
          return ColumnPair<IO>::of(
              runs[0] ? to_float(values[0][g]) : 0,
              kPerLane == 2 && runs[1] ? to_float(values[kPerLane - 1][g]) : 0);
        };
#pragma unroll
        for (int g = 0; g < G; ++g) {
          const ColumnPair<IO> dr_pair = masked(dr, g);
          const int at = (g * kWidth + u * 8) * int(sizeof(IO));
          store_operand<kRow>(write + (t & 1) * kOperandBytes + at, dr_pair, in_head[u]);
          outputs.put(t, g, Cell::kSplitGrad ? masked(dx, g) : dr_pair, u);
          if constexpr (Cell::kSplitGrad) outputs.put(t, G + g, dr_pair, u);
        }
      }
      inputs.wait();
      __syncthreads();
    }
    if (steps > 0) {
      float sums[kChains][4] = {};
      multiply(0, sums);
      enter(0, sums);
      outputs.send(0);
    }
    // Outputs are sent in descending order, so the pointer is at step 0 and padding lies above it.
    if (kRagged) outputs.clear(-(source.length + source.padding), source.padding);

#pragma unroll
    for (int c = 0; c < kPerLane; ++c) {
      if (!exists[c]) continue;
      const Column column(p, sequence_of<kPerLane>(p, first, 2 * q + c));
      for (int k = 0; k < K; ++k) {
        float* to = (float*)p.dstate + (k * p.S + column.index) * ND + at;
        for (int u = 0; u < 2; ++u) {
          if (in_head[u]) to[8 * u] = k < Cell::kGradStates ? to_float(d[c][u][k]) : 0;
        }
      }
    }
#pragma unroll
    // A lane has summed its own columns; add those of the four lanes of a row.
    for (int g = 0; g < R; ++g) {
      float* to = (float*)p.dbias_partial + (tile * R + g) * ND + at;
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        d_bias[g][u] += __shfl_xor_sync(~0u, d_bias[g][u], 1);
        d_bias[g][u] += __shfl_xor_sync(~0u, d_bias[g][u], 2);
        if (q == 0 && in_head[u]) to[8 * u] = d_bias[g][u];
      }
    }
  }
};

}  // namespace flashcell::cuda
