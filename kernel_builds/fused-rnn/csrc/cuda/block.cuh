// One thread block, one head, eight sequences, all of time: the head's weight stays in registers,
// so a step moves nothing but its own x and h. No two blocks ever wait for each other.
//
// Lane 4 r + q of a warp has every gate of its units for columns 2 q and 2 q + 1 (of tiles of four
// sequences, for 2 q only: the odd columns are empty), so what the cell needs meets in one lane and
// states never leave registers. Between two steps the operand (h forward, dr backward) crosses
// shared memory and one barrier; whatever is not on the way from one operand to the next happens in
// the shadow of the next step's products.
//
// What a step costs at least, lstm of width 64: the way through shared memory (80 clocks), 64
// matrix instructions on 4 tensor cores of 6.5 clocks each (104) and 5 x 512 non-linearities, 16 a
// clock (160, half of it in the shadow of the rest): about 0.15 us at 1.9 GHz.
#pragma once
#include "block_pipeline.cuh"
#include "engine.h"
#include "launch.h"

namespace flashcell::cuda {

// The widest head: registers hold 4 gates x 128 x 128 in 16 bits, 4 x 64 x 64 in 32.
template <typename IO>
constexpr int kBlockWidth = sizeof(IO) == 4 ? 64 : 128;

// The sequence of a column of the tile that starts at `first`; p.S, an empty one, where there is
// none.
template <int kOwn>
DEVICE int64_t sequence_of(const SequenceParams& p, int64_t first, int column) {
  if (kOwn == 1 && column % 2 == 1) return p.S;
  return min(p.S, first + (kOwn == 1 ? column / 2 : column));
}

// kWidth: D rounded up. kOwn: columns of a lane. kRagged: sequences may differ in length, and steps
// may reset or hold.
//
// Forward, a warp owns 8 units: rows r and r + 8 of a tile of the weight are two gates of unit r.
template <typename Cell_, typename IO_, int kWidth, int kOwn, bool kRagged>
struct BlockForward {
  using Cell = Cell_;
  using IO = IO_;
  using V = typename Lane<IO>::Value;
  static constexpr int G = Cell::kGates, K = Cell::kStates, R = Cell::kBias, kKept = Cell::kSaved;
  static constexpr int kThreads = kWidth * 4, kRow = kWidth + Lane<IO>::kVector;
  static constexpr int kSteps = kWidth / (2 * Lane<IO>::kVector);  // of the matrix instruction
  static constexpr int kTiles = (G + 1) / 2, kOperandBytes = kColumns * kRow * sizeof(IO);
  using Inputs = Pipeline<IO, kWidth, G, kThreads, 1>;
  using Outputs = Outbox<IO, kWidth, kKept + 2, kThreads>;  // h, h_prev, saved values

  struct Shared {
    IO operand[2][kColumns][kRow];  // h before a step, by the parity of the step
    typename Inputs::Shared inputs;
    typename Outputs::Shared outputs;
  };

  static DEVICE void run(const ForwardParams& p, Shared& shared) {
    const int lane = threadIdx.x % 32, q = lane % 4, D = int(p.D);
    const int warp_unit = threadIdx.x / 32 * 8, unit = warp_unit + lane / 4;
    const bool in_head = unit < D;
    const int64_t head = blockIdx.x % p.N, first = blockIdx.x / p.N * (4 * kOwn);
    const int64_t ND = p.N * p.D, at = head * p.D + unit;
    const int steps = kRagged ? longest(p, first, 4 * kOwn) : int(keep(uint32_t(p.T)));

    const Column source(p, sequence_of<kOwn>(p, first, Inputs::column()), p.x_batch);
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
          const int from = (2 * i + j / 2) * Lane<IO>::kVector + q * Lane<IO>::kWord;
          const IO* row = (const IO*)p.weight + ((g * p.N + head) * p.D + unit) * p.D;
          const bool inside = g < G && in_head && from < D;
          a[m][i][j] = operand<IO>(inside ? *(const uint32_t*)(row + from) : 0);
        }
      }
    }
    // The sums start from the bias. Of a cell with a row more, that row is the last gate's, and the
    // row before it is added to x.
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
    V state[kOwn][K];
#pragma unroll
    for (int c = 0; c < kOwn; ++c) {
      const int64_t s = sequence_of<kOwn>(p, first, 2 * q + c);
      const Column column(p, s);
      const bool given = p.initial != nullptr && in_head && s < p.S;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const int64_t from = (k * p.S + column.index) * ND + at;
        state[c][k] = given ? ((const float*)p.initial)[from] : 0.0f;
      }
    }
    const Marks<kRagged> marks[2] = {{p, sequence_of<kOwn>(p, first, 2 * q)},
                                     {p, sequence_of<kOwn>(p, first, 2 * q + 1)}};

    // A value of the lane's columns in io; an odd column that is empty holds 0.
    const auto both = [&](auto value) {
      return ColumnPair<IO>::of(value(0), kOwn == 2 ? value(kOwn - 1) : 0);
    };
    const uint32_t read =
        keep(shared_address(&shared.operand[0][lane % 8][lane / 8 * Lane<IO>::kVector]));
    const uint32_t write = keep(shared_address(&shared.operand[0][0][warp_unit]) +
                                tile_offset<IO, kRow>() * sizeof(IO));
    const bool saves = keep(p.saved != nullptr);
    bool runs[2];
    ColumnPair<IO> before;  // h as the step sees it
    const auto enter = [&](int t) {
#pragma unroll
      for (int c = 0; c < kOwn; ++c) {
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

    ColumnPair<IO> out[kKept + 2];  // of the step before
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

      V next[kOwn][K], saved[kOwn][kKept];
#pragma unroll
      for (int c = 0; c < kOwn; ++c) {
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
    for (int c = 0; c < kOwn; ++c) {
      const int64_t s = sequence_of<kOwn>(p, first, 2 * q + c);
      if (!in_head || s >= p.S) continue;
      const Column column(p, s);
      for (int k = 0; k < K; ++k) {
        ((float*)p.last)[(k * p.S + column.index) * ND + at] = to_float(state[c][k]);
      }
    }
  }
};

// Backward, a warp owns 16 units: rows r and r + 8 of a tile of the transposed weight are units r
// and r + 8, the depth is (gate, unit).
template <typename Cell_, typename IO_, int kWidth, int kOwn, bool kRagged>
struct BlockBackward {
  using Cell = Cell_;
  using IO = IO_;
  using V = typename Lane<IO>::Value;
  static constexpr int G = Cell::kGates, K = Cell::kStates, R = Cell::kBias, kKept = Cell::kSaved;
  static constexpr int kThreads = kWidth * 2, kRow = G * kWidth + Lane<IO>::kVector;
  static constexpr int kSteps = G * kWidth / (2 * Lane<IO>::kVector), kChains = 4;
  static constexpr int kOperandBytes = kColumns * kRow * sizeof(IO);
  using Inputs = Pipeline<IO, kWidth, kKept + 1, kThreads, 2>;  // saved values, and dh
  using Outputs = Outbox<IO, kWidth, Cell::kSplitGrad ? 2 * G : G, kThreads>;  // dx, and dr

  struct Shared {
    IO operand[2][kColumns][kRow];  // dr of a step, by the parity of the step
    typename Inputs::Shared inputs;
    typename Outputs::Shared outputs;
  };

  static DEVICE void run(const BackwardParams& p, Shared& shared) {
    const int lane = threadIdx.x % 32, q = lane % 4, D = int(p.D);
    const int warp_unit = threadIdx.x / 32 * 16, unit = warp_unit + lane / 4;
    const bool in_head[2] = {unit < D, unit + 8 < D};
    const int64_t head = blockIdx.x % p.N, tile = blockIdx.x / p.N, first = tile * (4 * kOwn);
    const int64_t ND = p.N * p.D, at = head * p.D + unit;
    const int steps = kRagged ? longest(p, first, 4 * kOwn) : int(keep(uint32_t(p.T)));
    const float bound = float(p.grad_clip);

    const Column source(p, sequence_of<kOwn>(p, first, Inputs::column()));
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
        const int depth = (2 * i + j / 2) * Lane<IO>::kVector + q * Lane<IO>::kWord;
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
    V d[kOwn][2][K];  // [column][unit]
    bool exists[kOwn];
#pragma unroll
    for (int c = 0; c < kOwn; ++c) {
      const int64_t s = sequence_of<kOwn>(p, first, 2 * q + c);
      const Column column(p, s);
      exists[c] = s < p.S;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const bool given = p.dlast != nullptr && k < Cell::kGradStates && exists[c];
        const float* from = (const float*)p.dlast + (k * p.S + column.index) * ND + at;
        for (int u = 0; u < 2; ++u) d[c][u][k] = given && in_head[u] ? from[8 * u] : 0.0f;
      }
    }
    const Marks<kRagged> marks[2] = {{p, sequence_of<kOwn>(p, first, 2 * q)},
                                     {p, sequence_of<kOwn>(p, first, 2 * q + 1)}};
    for (int i = threadIdx.x; i < 2 * kColumns * kRow; i += kThreads) {
      (&shared.operand[0][0][0])[i] = from_float<IO>(0);
    }
    inputs.wait();
    __syncthreads();

    const uint32_t read =
        keep(shared_address(&shared.operand[0][lane % 8][lane / 8 * Lane<IO>::kVector]));
    const uint32_t write = keep(shared_address(&shared.operand[0][0][warp_unit]) +
                                tile_offset<IO, kRow>() * sizeof(IO));
    const auto multiply = [&](int t, float (&sums)[kChains][4]) {  // weight^T dr of step t
      const uint32_t rows = read + (t & 1) * kOperandBytes;
#pragma unroll
      for (int i = 0; i < kSteps; i += 2) {
        uint32_t b[4];
        load_vectors(b, rows + i * 32);
        mma<IO>(sums[i % kChains], a[i], b[0], b[1]);
        mma<IO>(sums[i % kChains + 1], a[i + 1], b[2], b[3]);
      }
    };
    // The gradient that reaches the states before step t through it.
    const auto enter = [&](int t, const float (&sums)[kChains][4]) {
#pragma unroll
      for (int c = 0; c < kOwn; ++c) {
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
        V dx[kOwn][G], dr[kOwn][G];
#pragma unroll
        for (int c = 0; c < kOwn; ++c) {
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
          // An empty column of a tile holds anything, NaN too: it must not reach the sum.
          const bool counts = runs[c] && exists[c];
          for (int g = 0; g < G; ++g) d_bias[g][u] += counts ? to_float(dx[c][g]) : 0.0f;
          if constexpr (R > G) d_bias[R - 1][u] += counts ? to_float(dr[c][G - 1]) : 0.0f;
        }
        const auto masked = [&](const V(&values)[kOwn][G], int g) {
          return ColumnPair<IO>::of(runs[0] ? to_float(values[0][g]) : 0,
                                    kOwn == 2 && runs[1] ? to_float(values[kOwn - 1][g]) : 0);
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
    // The outbox stands before step 0: going on would be downwards.
    if (kRagged) outputs.clear(-(source.length + source.padding), source.padding);

#pragma unroll
    for (int c = 0; c < kOwn; ++c) {
      if (!exists[c]) continue;
      const Column column(p, sequence_of<kOwn>(p, first, 2 * q + c));
      for (int k = 0; k < K; ++k) {
        float* to = (float*)p.dstate + (k * p.S + column.index) * ND + at;
        for (int u = 0; u < 2; ++u) {
          if (in_head[u]) to[8 * u] = k < Cell::kGradStates ? to_float(d[c][u][k]) : 0;
        }
      }
    }
#pragma unroll
    for (int g = 0; g < R; ++g) {  // a lane has summed its columns; now the four lanes of a row
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

template <typename Engine, typename Params>
__global__ void __launch_bounds__(Engine::kThreads) block_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) char memory[];
  Engine::run(p, *reinterpret_cast<typename Engine::Shared*>(memory));
}

template <typename Engine, typename Params>
void launch_block(const Params& p, const Launch& launch) {
  constexpr int bytes = sizeof(typename Engine::Shared);
  static_assert(bytes <= 99 * 1024, "the least an arch we build for has");
  const auto kernel = block_kernel<Engine, Params>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const int64_t tiles = (p.S + launch.tile - 1) / launch.tile;
  kernel<<<unsigned(tiles * p.N), Engine::kThreads, bytes, launch.stream>>>(p);
  check(cudaGetLastError());
}

inline bool is_ragged(const SequenceParams& p) {
  return p.sequences != nullptr || p.reset != nullptr || p.hold != nullptr;
}

template <template <typename, typename, int, int, bool> typename Engine, typename Cell, typename IO,
          typename Params>
void select_block(const Params& p, const Launch& launch) {
  const auto with_tile = [&]<int kWidth, int kOwn>() {
    if (is_ragged(p)) return launch_block<Engine<Cell, IO, kWidth, kOwn, true>>(p, launch);
    launch_block<Engine<Cell, IO, kWidth, kOwn, false>>(p, launch);
  };
  const auto with_width = [&]<int kWidth>() {
    if (launch.tile == 4) return with_tile.template operator()<kWidth, 1>();
    with_tile.template operator()<kWidth, 2>();
  };
  if (p.D <= 32) return with_width.template operator()<32>();
  if (p.D <= 64) return with_width.template operator()<64>();
  if constexpr (kBlockWidth<IO> > 64) with_width.template operator()<128>();
}

template <typename Cell, typename IO>
void forward_block(const ForwardParams& p, const Launch& launch) {
  select_block<BlockForward, Cell, IO>(p, launch);
}

template <typename Cell, typename IO>
void backward_block(const BackwardParams& p, const Launch& launch) {
  select_block<BlockBackward, Cell, IO>(p, launch);
}

}  // namespace flashcell::cuda
