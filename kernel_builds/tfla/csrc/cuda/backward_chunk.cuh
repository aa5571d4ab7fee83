// dq, dk, dv and the gates' gradients of one chunk of one head: a thread block for dv, and one for dq
// and dk. Both take products of all pairs of rows (q k, or dh v), weigh them in registers to a triangle
// E of tiles in shared memory (W/N, or dS), and multiply that:
//
//   dv = a (k dC) + E^T dh       dq = s (dh C^T / N + delta n) + E k       dk = a (v dC^T + dn) + E^T q
//
// README, Backward, has the symbols. Factors of rows are applied to sums, in fp32.
#pragma once
#include "backward.h"
#include "tile.cuh"

namespace flashcell::cuda {

template <typename IO>
struct Matrix {  // row-major, in global memory; beyond its rows and columns are zeros
  const IO* data;
  int64_t stride;
  int rows, columns;
};

template <typename IO, int kTiles>
struct ChunkGradients {
  static constexpr int kThreads = 256, kRows = kTile * kTiles, kStrips = 2 * kTiles;
  static constexpr int kColumns = 2 * kPanel<IO>;   // of an output at a time
  static constexpr int kBlocks = kColumns / 4 / 8;  // of 8 columns, of a warp
  static constexpr int kStages = 2;
  static constexpr int kSlot = kTile * kColumns * int(sizeof(IO));  // what one matrix takes at least
  static constexpr int kPairBytes = Tile<IO, kTile>::bytes(kTile);
  static constexpr int kRowBytes = kRows * kPanelBytes, kStage = kTiles * kSlot;
  static_assert(2 * kRowBytes <= kStage);

  using RowTile = Tile<IO, kRows>;        // rows of the chunk, one panel of depth
  using PairTile = Tile<IO, kTile>;       // of E
  using InnerTile = Tile<IO, kTile>;      // 64 rows, kColumns of them
  using StateRows = Tile<IO, kColumns>;   // kColumns rows of a state, one panel of depth
  using StateDepth = Tile<IO, kPanel<IO>>;  // one panel's rows of a state, kColumns of them

  struct Output {
    Matrix<IO> rows, state, inner;
    int depth, blocks;  // steps through the state, blocks of columns
  };
  struct Shared {
    alignas(1024) char ring[kStages * kStage];
    char triangle[kTiles * (kTiles + 1) / 2][kPairBytes];
    float4 of_row[kRows];       // u, inverse, delta of a row
    float2 w[kRows];
    float past[kRows], future[kRows], inflow[kRows], outflow[kRows];
    int start[kRows];
    float flow[2][4][kRows];    // what a row takes in, and what it gives, by warps
    Matrix<IO> left, right;     // of the products of pairs
    Output outputs[2];
  };

  const BackwardParams& p;
  const BackwardTerms& terms;
  Shared& shared;
  const Chunk chunk;
  const int64_t slot;
  const int head;
  const int group, part, quad, lane_row;  // of the warp: strips 2 i + group, columns; of the lane
  const bool has_h;
  int pair_steps = 0, outputs = 1, stage = 0;

  DEVICE ChunkGradients(const BackwardParams& params, const BackwardTerms& t, Shared& s, int64_t slot,
                        int head)
      : p(params),
        terms(t),
        shared(s),
        chunk(t.rows.chunks.at(slot)),
        slot(slot),
        head(head),
        group(warp() / 4),
        part(warp() % 4),
        quad(threadIdx.x % 4),
        lane_row(threadIdx.x % 32 / 4),
        has_h(params.dh != nullptr) {}

  DEVICE static int warp() { return __shfl_sync(~0u, int(threadIdx.x / 32), 0); }

  // ---- Loads: a stage ahead of the products. ----

  DEVICE Matrix<IO> matrix(const Strided& x, int64_t width) const {
    const int64_t b = chunk.row / p.T, t = chunk.row % p.T;
    return {static_cast<const IO*>(x.data) + b * x.batch + t * x.time + head * x.head, x.time,
            chunk.steps, int(width)};
  }
  DEVICE Matrix<IO> dh() const { return matrix({p.dh, p.T * p.H * p.V, p.H * p.V, p.V}, p.V); }
  DEVICE Matrix<IO> state(const void* states) const {
    const int64_t size = p.K * p.V;
    return {static_cast<const IO*>(states) + terms.rows.slot(head, slot) * size, p.V, int(p.K),
            int(p.V)};
  }

  template <int kWidth, typename To>
  DEVICE static void load(To to, const Matrix<IO>& from, int row, int column) {
    copy_tile<kThreads, kWidth>(to, from.data + row * from.stride + column, from.stride,
                                from.rows - row, from.columns - column);
  }

  // Stage `index` of all that this thread block reads.
  template <bool kByDepth>
  DEVICE void issue(int index) const {
    const uint32_t to = shared_address(shared.ring) + index % kStages * kStage;
    if (index < pair_steps) {
      load<kPanel<IO>>(RowTile{to}, shared.left, 0, index * kPanel<IO>);
      load<kPanel<IO>>(RowTile{to + kRowBytes}, shared.right, 0, index * kPanel<IO>);
    } else {
      index -= pair_steps;
      const int first = (shared.outputs[0].depth + has_h) * shared.outputs[0].blocks;
      const bool second = index >= first;
      if (second) index -= first;
      const Output& output = shared.outputs[second];
      const int steps = output.depth + has_h;
      if (int(second) < outputs && index < steps * output.blocks) {
        const int column = index / steps * kColumns, depth = index % steps;
        if (depth < output.depth) {
          load<kPanel<IO>>(RowTile{to}, output.rows, 0, depth * kPanel<IO>);
          if constexpr (kByDepth) {
            load<kColumns>(StateDepth{to + kRowBytes}, output.state, depth * kPanel<IO>, column);
          } else {
            load<kPanel<IO>>(StateRows{to + kRowBytes}, output.state, column, depth * kPanel<IO>);
          }
        } else {
#pragma unroll
          for (int j = 0; j < kTiles; ++j) {
            load<kColumns>(InnerTile{to + j * kSlot}, output.inner, j * kTile, column);
          }
        }
      }
    }
    copy_commit();
  }

  template <bool kByDepth>
  DEVICE void begin() const {
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) issue<kByDepth>(i);
  }
  template <bool kByDepth>
  DEVICE uint32_t next() {
    copy_wait<kStages - 2>();
    __syncthreads();
    issue<kByDepth>(stage + kStages - 1);
    return shared_address(shared.ring) + stage++ % kStages * kStage;
  }

  // ---- Products: straight-line code, so that loads of operands run ahead. ----

  // Strip i of the warp: 16 rows of tile i / 2, in its first or second half. The groups have
  // neighbouring strips, so that each has half of any triangle.
  DEVICE int strip_row(int i) const { return i * 32 + group * 16; }
  // Of a tile of pairs the warp takes 8 columns of the first half and 8 of the second. Above the
  // diagonal is the second half of a diagonal tile for the strips of its first half.
  DEVICE int pair_column(int half) const { return half * 32 + part * 8; }
  static constexpr DEVICE bool is_above(int i, int j, int half) {
    return j == i / 2 && half > i % 2;
  }

  using PairSums = Sums<kTiles * (kTiles + 1), 2>;  // strip i's of tile j at of_pair(i, j)
  static constexpr DEVICE int of_pair(int i, int j) { return (i / 2 + i % 2) * (i / 2 + 1) + j; }

  template <bool kByDepth>
  DEVICE void multiply_pairs(PairSums& sums) {
    const int second_half = threadIdx.x % 32 / 16 * 24;  // lanes of the second eight columns
    for (int s = 0; s < pair_steps; ++s) {
      const uint32_t rows = next<kByDepth>();
      const Left<Lies::kAlong, IO, kRows> left(RowTile{rows}, group * 16, 0);
      const Right<Lies::kAlong, IO, kRows> right(RowTile{rows + kRowBytes},
                                                 part * 8 + second_half, 0);
#pragma unroll
      for (int k = 0; k < kPanel<IO> / kDepth<IO>; ++k) {
        uint32_t b[kTiles][4];
#pragma unroll
        for (int j = 0; j < kTiles; ++j) right.load(b[j], j * 4, k);
#pragma unroll
        for (int i = 0; i < kStrips; ++i) {
          uint32_t a[4];
          left.load(a, 2 * i, k);
#pragma unroll
          for (int j = 0; j <= i / 2; ++j) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              if (is_above(i, j, half)) continue;
              multiply_piece<IO>(sums[of_pair(i, j)][half], a, b[j][2 * half], b[j][2 * half + 1]);
            }
          }
        }
      }
    }
  }

  DEVICE PairTile pair_tile(int row, int column) const {
    return {shared_address(shared.triangle[row * (row + 1) / 2 + column])};
  }

  DEVICE void load_row_terms(bool has_delta) const {
    const int row = threadIdx.x;
    if (row >= kRows) return;
    const Rows& rows = terms.rows;
    const bool exists = row < chunk.steps;
    const int64_t at = rows.row(head, chunk) + (exists ? row : 0);
    const auto or_zero = [&](const float* x) { return exists ? x[at] : 0.f; };
    const float2 u = rows.u[at], w = rows.w[at];
    const float inverse = terms.inverse ? terms.inverse[at] : terms.scale;
    shared.of_row[row] =
        make_float4(u.x, u.y, exists ? inverse : 0.f, has_delta ? or_zero(terms.delta) : 0.f);
    shared.w[row] = w;
    shared.past[row] = or_zero(rows.past), shared.future[row] = or_zero(rows.future);
    shared.inflow[row] = or_zero(rows.inflow), shared.outflow[row] = or_zero(rows.outflow);
    shared.start[row] = exists ? rows.start[chunk.row + row] : kRows;
  }

  // E = decay_tj (inverse_t sums + delta_t), where t sees j; all of it is written that is read.
  DEVICE void weigh(const PairSums& sums) const {
    const float* decays =
        terms.rows.tile_decay + terms.rows.slot(head, slot) * terms.rows.chunks.tiles();
    float decay[kTiles];
    float2 future[kTiles][2];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      decay[j] = j > 0 && j * kTile < chunk.steps ? decays[j] : 0.f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* at = &shared.future[j * kTile + pair_column(half) + 2 * quad];
        future[j][half] = reinterpret_cast<const float2&>(*at);
      }
    }
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
#pragma unroll
      for (int down = 0; down < 2; ++down) {
        const int t = strip_row(i) + lane_row + 8 * down, row = t % kTile;
        const float4 of_row = shared.of_row[t];
        float past = shared.past[t];
        const auto value = [&](int j, int half, int e) {
          return fmaf(of_row.z, sums[of_pair(i, j)][half][2 * down + e], of_row.w);
        };
#pragma unroll
        for (int j = i / 2 - 1; j >= 0; --j) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float2 f = future[j][half];
            store_pair(pair_tile(i / 2, j), row, pair_column(half) + 2 * quad,
                       past * f.x * value(j, half, 0), past * f.y * value(j, half, 1));
          }
          past *= decay[j];
        }
        const int start = shared.start[t];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (is_above(i, i / 2, half)) continue;
          const int column = pair_column(half) + 2 * quad;
          float e[2];
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const float2 w = shared.w[i / 2 * kTile + column + c];
            const float decay = exp2_approx((of_row.x + w.x) + (of_row.y + w.y));
            const bool seen = start <= column + c && column + c <= row;
            e[c] = seen ? decay * value(i / 2, half, c) : 0.f;
          }
          store_pair(pair_tile(i / 2, i / 2), row, column, e[0], e[1]);
        }
      }
    }
  }
  DEVICE static float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }

  using OutputSums = Sums<kStrips, kBlocks>;

  template <bool kByDepth>
  DEVICE void multiply_state(OutputSums& sums, uint32_t rows) const {
    const Left<Lies::kAlong, IO, kRows> left(RowTile{rows}, group * 16, 0);
    const auto state = [&] {
      if constexpr (kByDepth) {
        return Right<Lies::kAcross, IO, kPanel<IO>>(StateDepth{rows + kRowBytes}, 0,
                                                    part * (kColumns / 4));
      } else {
        return Right<Lies::kAlong, IO, kColumns>(StateRows{rows + kRowBytes}, part * (kColumns / 4),
                                                 0);
      }
    }();
#pragma unroll
    for (int k = 0; k < kPanel<IO> / kDepth<IO>; ++k) {
      uint32_t b[kBlocks / 2][4];
#pragma unroll
      for (int c = 0; c < kBlocks / 2; ++c) state.load(b[c], c, k);
#pragma unroll
      for (int i = 0; i < kStrips; ++i) {
        uint32_t a[4];
        left.load(a, 2 * i, k);
        multiply_strip(sums[i], a, b);
      }
    }
  }

  DEVICE static void multiply_strip(float (&sums)[kBlocks][4], const uint32_t (&a)[4],
                                    const uint32_t (&b)[kBlocks / 2][4]) {
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) {
      multiply_piece<IO>(sums[c], a, b[c / 2][c % 2 * 2], b[c / 2][c % 2 * 2 + 1]);
    }
  }

  // sums += E inner, or E^T inner; of diagonal tiles what is not above the diagonal.
  template <bool kTransposed>
  DEVICE void multiply_triangle(OutputSums& sums, uint32_t inner) const {
    constexpr Lies kLies = kTransposed ? Lies::kAcross : Lies::kAlong;
    using Strip = Left<kLies, IO, kTile>;
    const auto strip = [&](int half) {
      const int row = half * 32 + group * 16;
      return Strip(pair_tile(0, 0), kTransposed ? 0 : row, kTransposed ? row : 0);
    };
    const Strip strips[2] = {strip(0), strip(1)};
    const Right<Lies::kAcross, IO, kTile> right(InnerTile{inner}, 0, part * (kColumns / 4));
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int k = 0; k < kTile / kDepth<IO>; ++k) {
        const int half = k * kDepth<IO> / 32;  // of the tile's depth
        uint32_t b[kBlocks / 2][4];
        auto inner_tile = right;
        inner_tile.lane += j * kSlot;
#pragma unroll
        for (int c = 0; c < kBlocks / 2; ++c) inner_tile.load(b[c], c, k);
#pragma unroll
        for (int i = 0; i < kStrips; ++i) {
          const int ahead = (i / 2 - j) * 2 + i % 2 - half;  // halves of tiles
          if (kTransposed ? ahead > 0 : ahead < 0) continue;
          const int row = kTransposed ? j : i / 2, column = kTransposed ? i / 2 : j;
          Strip left = strips[i % 2];
          left.lane += (row * (row + 1) / 2 + column) * kPairBytes;
          uint32_t a[4];
          left.load(a, 0, k);
          multiply_strip(sums[i], a, b);
        }
      }
    }
  }

  // ---- Outputs. ----

  // body(strip, half, row, whether the row exists), for the lane's rows.
  template <typename Body>
  DEVICE void for_rows(const Body& body) const {
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = strip_row(i) + lane_row + 8 * half;
        body(i, half, row, row < chunk.steps);
      }
    }
  }

  struct Factors {
    float outer, gain, add;
  };

  // sums = outer (gain sums + add vector), row by row; 0 where outer is 0, whatever the state holds.
  template <typename FactorsOf>
  DEVICE void scale(OutputSums& sums, const float* vector, int first, int width,
                    const FactorsOf& factors_of) const {
    float added[kBlocks][2];
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) {
      const int column = first + 8 * c + 2 * quad;
      const bool has = vector && column < width;
      added[c][0] = has ? vector[column] : 0.f, added[c][1] = has ? vector[column + 1] : 0.f;
    }
    for_rows([&](int i, int half, int row, bool) {
      const Factors f = factors_of(row);
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& sum = sums[i][c][2 * half + e];
          sum = f.outer == 0 ? 0.f : f.outer * fmaf(f.gain, sum, f.add * added[c][e]);
        }
      }
    });
  }

  DEVICE void store(const OutputSums& sums, void* to, int first, int width) const {
    IO* rows = static_cast<IO*>(to) + (chunk.row * p.H + head) * width + first;
    for_rows([&](int i, int half, int row, bool exists) {
      float low[4] = {}, high[4] = {};  // fp32 has half as many columns
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) {
        low[c] = sums[i][c][2 * half], high[c] = sums[i][c][2 * half + 1];
      }
      const int own = width - first < 8 * kBlocks ? width - first : 8 * kBlocks;
      store_row<IO>(rows + row * p.H * width, low, high, exists, own);
    });
  }

  // The warp's part of the rows' products with those of x: added to flow, by the lanes that own it.
  // Sums of what does not exist are 0.
  DEVICE void add_flow(float (&flow)[4][kRows], const OutputSums& sums, const Matrix<IO>& x,
                       int first) const {
    int columns[kBlocks];
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) {
      columns[c] = (first + 8 * c < x.columns ? first + 8 * c : 0) + 2 * quad;
    }
    for_rows([&](int i, int half, int row, bool exists) {
      const IO* from = x.data + (exists ? row : 0) * x.stride;
      float total = 0;
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) {
        const float2 pair = load_pair(from + columns[c]);
        total = fmaf(sums[i][c][2 * half], pair.x, total);
        total = fmaf(sums[i][c][2 * half + 1], pair.y, total);
      }
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) total += __shfl_xor_sync(~0u, total, mask);
      if (quad == 0) flow[part][row] += total;
    });
  }
  DEVICE static float2 load_pair(const IO* from) {
    if constexpr (sizeof(IO) == 4) {
      return reinterpret_cast<const float2&>(*from);
    } else {
      return reinterpret_cast<const Pair<IO>&>(*from).floats();
    }
  }

  template <bool kTransposed, bool kByDepth, typename FactorsOf>
  DEVICE void run(int index, const float* vector, const FactorsOf& factors_of, void* to, int width,
                  const Matrix<IO>* x, int flow) {
    const int depth = shared.outputs[index].depth, blocks = shared.outputs[index].blocks;
    for (int block = 0; block < blocks; ++block) {
      const int first = block * kColumns + part * (kColumns / 4);
      OutputSums sums;
      clear(sums);
      for (int s = 0; s < depth; ++s) multiply_state<kByDepth>(sums, next<kByDepth>());
      if (depth) scale(sums, vector, first, width, factors_of);
      if (has_h) multiply_triangle<kTransposed>(sums, next<kByDepth>());
      store(sums, to, first, width);
      if (x) add_flow(shared.flow[flow], sums, *x, first);
    }
  }

  // Rows of padding have no gradients.
  template <typename X>
  DEVICE void clear_padding(void* to, int64_t width) const {
    X* rows = static_cast<X*>(to) + (chunk.row * p.H + head) * width;
    for (int row = chunk.steps; row < chunk.rows; ++row) {
      for (int64_t i = threadIdx.x; i < width; i += kThreads) rows[row * p.H * width + i] = X(0.f);
    }
  }

  static DEVICE int parts(int64_t width, int size) { return int((width + size - 1) / size); }
  DEVICE bool has_before() const { return has_h && (chunk.number > 0 || p.C || p.n); }
  DEVICE bool has_after() const { return chunk.steps && (!terms.is_last(slot) || p.dlast_C || p.dlast_n); }

  DEVICE void values() {
    clear_padding<IO>(p.dv, p.V);
    if (chunk.steps == 0) return;
    const int depth = parts(p.K, kPanel<IO>);
    pair_steps = has_h ? depth : 0;
    if (threadIdx.x == 0) {
      Output& output = shared.outputs[0];
      shared.right = output.rows = matrix(p.k, p.K);
      if (has_h) shared.left = matrix(p.q, p.K), output.inner = dh();
      output.state = state(terms.dC);
      output.depth = has_after() ? depth : 0, output.blocks = parts(p.V, kColumns);
    }
    __syncthreads();
    begin<true>();
    load_row_terms(false);
    if (has_h) {
      PairSums pairs;
      clear(pairs);
      multiply_pairs<true>(pairs);
      weigh(pairs);
    }
    run<true, true>(
        0, nullptr, [&](int row) { return Factors{shared.outflow[row], 1, 0}; }, p.dv, int(p.V),
        nullptr, 0);
  }

  DEVICE void keys() {
    if (p.dq) clear_padding<IO>(p.dq, p.K);
    clear_padding<IO>(p.dk, p.K);
    clear_padding<float>(p.di, 1), clear_padding<float>(p.df, 1);
    if (chunk.steps == 0) return;
    const int depth = parts(p.V, kPanel<IO>);
    pair_steps = has_h ? depth : 0, outputs = 2;
    if (threadIdx.x == 0) {
      Output &dq = shared.outputs[0], &dk = shared.outputs[1];
      shared.right = dk.rows = matrix(p.v, p.V), dq.inner = matrix(p.k, p.K);
      if (has_h) shared.left = dq.rows = dh(), dk.inner = matrix(p.q, p.K);
      dq.state = state(terms.C), dk.state = state(terms.dC);
      dq.depth = has_before() ? depth : 0, dk.depth = has_after() ? depth : 0;
      dq.blocks = p.dq ? parts(p.K, kColumns) : 0, dk.blocks = parts(p.K, kColumns);
    }
    for (int i = threadIdx.x; i < 2 * 4 * kRows; i += kThreads) (&shared.flow[0][0][0])[i] = 0;
    __syncthreads();
    begin<false>();
    load_row_terms(has_h && terms.delta);
    if (has_h) {
      PairSums pairs;
      clear(pairs);
      multiply_pairs<false>(pairs);
      weigh(pairs);
    }
    const int64_t states = terms.rows.slot(head, slot) * p.K;
    run<false, false>(
        0, terms.n ? terms.n + states : nullptr,
        [&](int row) {
          const float4 of_row = shared.of_row[row];
          return Factors{shared.inflow[row], of_row.z, of_row.w};
        },
        p.dq, int(p.K), has_h ? &shared.outputs[1].inner : nullptr, 0);
    run<true, false>(
        1, terms.dn ? terms.dn + states : nullptr,
        [&](int row) { return Factors{shared.outflow[row], 1, 1}; }, p.dk, int(p.K),
        &shared.outputs[0].inner, 1);
    __syncthreads();
    if (threadIdx.x < 32) gates();
  }

  // di and df: what flows out of step j, and what crosses step t. Later steps are in lower lanes.
  DEVICE void gates() const {
    const int lane = threadIdx.x;
    float crossing = has_after() ? terms.anchor(head, slot) : 0.f;
    for (int last = (chunk.steps - 1) / 32 * 32 + 31; last > 0; last -= 32) {
      const int t = last - lane;
      const bool exists = t < chunk.steps;
      const int64_t row = chunk.row + t;
      float in = 0, out = 0;
      for (int i = 0; i < 4; ++i) in += shared.flow[0][i][t], out += shared.flow[1][i][t];
      bool stopped = exists && p.reset && p.reset[row];  // nothing crosses a reset
      float total = exists && !stopped ? in - out : 0.f;
#pragma unroll
      for (int by = 1; by < 32; by *= 2) {
        const float later = __shfl_up_sync(~0u, total, by);
        const bool stop = __shfl_up_sync(~0u, int(stopped), by);
        if (lane >= by && !stopped) total += later, stopped = stop;
      }
      if (!stopped) total += crossing;
      crossing = __shfl_sync(~0u, total, 31);
      if (exists) store_gates(row, total, out);
    }
  }

  DEVICE void store_gates(int64_t row, float crossing, float out) const {
    const auto slope = [&](const Strided& gate) {  // of logsigmoid
      const int64_t at = row / p.T * gate.batch + row % p.T * gate.time + head * gate.head;
      return 1 / (1 + expf(static_cast<const float*>(gate.data)[at]));
    };
    const bool held = p.hold && p.hold[row];
    const float di = held ? 0.f : p.exponential ? out : out * slope(p.i);
    static_cast<float*>(p.di)[row * p.H + head] = di;
    static_cast<float*>(p.df)[row * p.H + head] = held ? 0.f : crossing * slope(p.f);
  }
};

// In the order of blocks: chunk, head, and dq dk before dv, so that both read their rows at a time.
template <typename IO, int kTiles>
__global__ void __launch_bounds__(256, kTiles == 2 && sizeof(IO) == 2 ? 2 : 1)
    chunk_gradients(const BackwardParams p, const BackwardTerms terms) {
  using Gradients = ChunkGradients<IO, kTiles>;
  extern __shared__ __align__(1024) char memory[];
  const int64_t block = blockIdx.x / 2;
  Gradients gradients(p, terms, *reinterpret_cast<typename Gradients::Shared*>(memory), block / p.H,
                      int(block % p.H));
  if (blockIdx.x % 2) {
    gradients.values();
  } else {
    gradients.keys();
  }
}

}  // namespace flashcell::cuda
