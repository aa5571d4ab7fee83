// The forward pass of the block engine; launch.cuh describes the engine.
#pragma once
#include "pipeline.cuh"

namespace flashcell::cuda {

// kWidth is D rounded up. kPerLane is the number of columns of a lane. With kRagged sequences may
// differ in length and steps may reset or hold.
//
// A warp owns 8 units: rows r and r + 8 of a tile of the weight are two gates of unit r.
template <typename Cell_, typename IO_, int kWidth, int kPerLane, bool kRagged>
struct BlockForward : BlockSizes<Cell_, IO_, kWidth, 8, kWidth> {
  using Sizes = BlockSizes<Cell_, IO_, kWidth, 8, kWidth>;
  using Sizes::G, Sizes::K, Sizes::R, Sizes::kKept;
  using Sizes::kOperandBytes, Sizes::kRow, Sizes::kSteps, Sizes::kThreads;
  using typename Sizes::Cell, typename Sizes::IO, typename Sizes::V;
  static constexpr int kTiles = (G + 1) / 2;
  using Inputs = Pipeline<IO, kWidth, G, kThreads, 1>;
  using Outputs = Outbox<IO, kWidth, kKept + 2, kThreads>;  // h, h_prev, then saved values
  static constexpr int64_t planned_bytes(bool turing) {
    return block::forward_shared_bytes(kSizesOf<Cell>, kWidth, sizeof(IO), turing);
  }
  // The operand in shared memory is h before a step.
  using Shared = typename Sizes::template Memory<Inputs, Outputs>;

  static DEVICE void run(const ForwardParams& p, Shared& shared) {
    const int lane = threadIdx.x % 32, q = lane % 4, D = int(p.D);
    const int warp_unit = threadIdx.x / 32 * Sizes::kUnits, unit = warp_unit + lane / 4;
    const bool in_head = unit < D;
    const int64_t head = p.first_head + blockIdx.x % p.heads;
    const int64_t first = blockIdx.x / p.heads * (4 * kPerLane);
    const int64_t ND = p.N * p.D, at = head * p.D + unit;
    const int steps = kRagged ? longest(p, first, 4 * kPerLane) : int(keep(uint32_t(p.T)));

    const Column source(p, sequence_of<kPerLane>(p, first, Inputs::column()), p.x_batch);
    Inputs inputs(shared.inputs, warp_unit, source.length, D, 0, 1,
                  (const IO*)p.x + source.x_offset + head * p.x_head, p.x_gate, p.x_time);
    Outputs outputs(
        shared.outputs, warp_unit, source.length, D,
        [&](int row) -> IO* {
          if (row == 0) return (IO*)p.h + source.row * ND + head * p.D;
          if (p.saved == nullptr) return nullptr;
          if (row == 1) return (IO*)p.h_prev + source.row * ND + head * p.D;
          return (IO*)p.saved + (source.row * kKept + row - 2) * ND + head * p.D;
        },
        [&](int row) { return row < 2 ? ND : kKept * ND; });

    uint32_t a[kTiles][kSteps][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int g = 2 * m + j % 2;
          const int from = (2 * i + j / 2) * IoTraits<IO>::kVector + q * IoTraits<IO>::kWord;
          const IO* row = (const IO*)p.weight + ((g * p.N + head) * p.D + unit) * p.D;
          const bool inside = g < G && in_head && from < D;
          a[m][i][j] = operand<IO>(inside ? *(const uint32_t*)(row + from) : 0);
        }
      }
    }
    // The sums start from the bias. If the cell has an extra bias row, that one is added to the
    // last gate's product, and the last gate's own row to x.
    float start[kTiles][4] = {};
    float x_bias = 0;
    if (p.bias != nullptr && in_head) {
      const auto row = [&](int g) { return ((const float*)p.bias)[g * ND + at]; };
#pragma unroll
      for (int g = 0; g < G; ++g) {
        const float value = row(R > G && g == G - 1 ? R - 1 : g);
        start[g / 2][g % 2 * 2] = start[g / 2][g % 2 * 2 + 1] = value;
      }
      if (R > G) x_bias = row(G - 1);
    }
    V state[kPerLane][K];
#pragma unroll
    for (int c = 0; c < kPerLane; ++c) {
      const int64_t s = sequence_of<kPerLane>(p, first, 2 * q + c);
      const Column column(p, s);
      const bool given = p.initial != nullptr && in_head && s < p.S;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const int64_t from = (k * p.S + column.index) * ND + at;
        state[c][k] = given ? ((const float*)p.initial)[from] : 0.0f;
      }
    }
    const Marks<kRagged> marks[2] = {{p, sequence_of<kPerLane>(p, first, 2 * q)},
                                     {p, sequence_of<kPerLane>(p, first, 2 * q + 1)}};

    // Rounds a value of the lane's columns to io; an empty odd column gets 0.
    const auto both = [&](auto value) {
      return ColumnPair<IO>::of(value(0), kPerLane == 2 ? value(kPerLane - 1) : 0);
    };
    const uint32_t read =
        keep(shared_address(&shared.operand[0][lane % 8][lane / 8 * IoTraits<IO>::kVector]));
    const uint32_t write = keep(shared_address(&shared.operand[0][0][warp_unit]) +
                                tile_offset<IO, kRow>() * sizeof(IO));
    const bool saves = keep(p.saved != nullptr);
    bool runs[2];
    ColumnPair<IO> before;  // h as the step reads it, after a reset
    const auto enter = [&](int t) {
#pragma unroll
      for (int c = 0; c < kPerLane; ++c) {
        if (marks[c].resets(p, t)) {
          for (int k = 0; k < K; ++k) state[c][k] = V(0);
        }
        runs[c] = marks[c].runs(p, t);
      }
      before = both([&](int c) { return to_float(state[c][0]); });
      store_operand<kRow>(write + (t & 1) * kOperandBytes, before, in_head);
    };
    enter(0);
    inputs.wait();
    __syncthreads();

    ColumnPair<IO> out[kKept + 2];  // outputs of the step before
    const auto put = [&](int t) {
      outputs.put(t, 0, out[0]);
      if (!saves) return;
#pragma unroll
      for (int i = 1; i < kKept + 2; ++i) outputs.put(t, i, out[i]);
    };
    for (int t = 0; t < steps; ++t) {
      ColumnPair<IO> x[G];
      inputs.load(x, t);
      float sums[kTiles][4];
      const uint32_t rows = read + (t & 1) * kOperandBytes;
#pragma unroll
      for (int i = 0; i < kSteps; i += 2) {
        uint32_t b[4];
        load_vectors(b, rows + i * 32);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          mma<IO>(sums[m], a[m][i], b[0], b[1], i == 0 ? start[m] : sums[m]);
        }
#pragma unroll
        for (int m = 0; m < kTiles; ++m) mma<IO>(sums[m], a[m][i + 1], b[2], b[3]);
      }
      if (t > 1) outputs.send(t - 2);
      if (t > 0) put(t - 1);
      inputs.start(t + Inputs::kStages - 1);

      V next[kPerLane][K], saved[kPerLane][kKept];
#pragma unroll
      for (int c = 0; c < kPerLane; ++c) {
        V in[G], r[G];
#pragma unroll
        for (int g = 0; g < G; ++g) {
          in[g] = c ? x[g].floats().y : x[g].floats().x;
          r[g] = sums[g / 2][g % 2 * 2 + c];
        }
        if constexpr (R > G) in[G - 1] += V(x_bias);
        Cell::forward(in, r, state[c], next[c], saved[c]);
        for (int k = 0; k < K; ++k) state[c][k] = select(runs[c], next[c][k], state[c][k]);
      }
      const auto masked = [&](auto value) {
        return both([&](int c) { return runs[c] ? value(c) : 0.0f; });
      };
      out[0] = masked([&](int c) { return to_float(next[c][0]); });
      out[1] = before;
      if (kRagged) {
        const float2 h = before.floats();
        out[1] = masked([&](int c) { return c ? h.y : h.x; });
      }
#pragma unroll
      for (int v = 0; v < kKept; ++v) {
        out[2 + v] = masked([&](int c) { return to_float(saved[c][v]); });
      }
      enter(t + 1);
      inputs.wait();
      __syncthreads();
    }
    if (steps > 1) outputs.send(steps - 2);
    if (steps > 0) put(steps - 1);
    __syncthreads();
    if (steps > 0) outputs.send(steps - 1);
    if (kRagged) outputs.clear(source.length - steps, source.padding);

#pragma unroll
    for (int c = 0; c < kPerLane; ++c) {
      const int64_t s = sequence_of<kPerLane>(p, first, 2 * q + c);
      if (!in_head || s >= p.S) continue;
      const Column column(p, s);
      for (int k = 0; k < K; ++k) {
        ((float*)p.last)[(k * p.S + column.index) * ND + at] = to_float(state[c][k]);
      }
    }
  }
};

}  // namespace flashcell::cuda
