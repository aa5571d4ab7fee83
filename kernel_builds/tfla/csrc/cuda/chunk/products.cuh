// The products of a thread block for one chunk of one head: of all pairs of rows (q k or dh v),
// which are weighted in registers to form a lower triangle E of tiles in shared memory; of rows
// with a state; and of E with rows (C q + E v, for example).
#pragma once
#include "loads.cuh"

namespace flashcell::cuda {

template <typename IO, int kTiles>
struct ChunkProducts : ChunkLoads<IO, kTiles> {
  using Base = ChunkLoads<IO, kTiles>;
  using Base::Base;
  using Base::chunk, Base::group, Base::head, Base::kBlocks, Base::kColumns, Base::kGroups,
      Base::kPairBytes, Base::kRowBytes, Base::kRows, Base::kStrips, Base::kThreads, Base::lane_row,
      Base::p, Base::part, Base::quad, Base::rows, Base::shared, Base::slot;
  using typename Base::InnerTile, typename Base::PairTile, typename Base::RowTile,
      typename Base::StateDepth, typename Base::StateRows;

  // Returns the first row of the warp's strip i; it lies in tile tile_of(i). Neighbouring strips
  // belong to different groups, so that each has an equal part of a triangle.
  DEVICE int strip_row(int i) const { return (i * kGroups + group) * 16; }
  static constexpr DEVICE int tile_of(int i) { return i * kGroups / 4; }
  // In a tile of pairs the warp has 8 columns of the first half and 8 of the second.
  DEVICE int pair_column(int half) const { return half * 32 + part * 8; }
  // Whether half `column` of tile j lies above the diagonal for the whole of strip i, as far as
  // compile time knows: with two groups a strip lies in one half of a tile, with four in either.
  static constexpr DEVICE bool is_above(int i, int j, int column) {
    return j == tile_of(i) && kGroups == 2 && column > i % 2;
  }

  // The sums of strip i for tile j are at of_pair(i, j).
  using PairSums = Sums<kTiles*(kTiles + 1) / kGroups * 2, 2>;
  static constexpr DEVICE int of_pair(int i, int j) {
    const int tile = tile_of(i), strips = 4 / kGroups;
    return tile * (tile + 1) / 2 * strips + i % strips * (tile + 1) + j;
  }

  template <bool kByDepth>
  DEVICE void multiply_pairs(PairSums& sums, int steps) {
    // Used by the lanes that load the second eight columns.
    const int second_half = threadIdx.x % 32 / 16 * 24;
    for (int s = 0; s < steps; ++s) {
      const uint32_t rows = this->template next<kByDepth>();
      const Left<Lies::kAlong, IO, kRows> left(RowTile{rows}, group * 16, 0);
      const Right<Lies::kAlong, IO, kRows> right(RowTile{rows + kRowBytes}, part * 8 + second_half,
                                                 0);
#pragma unroll
      for (int k = 0; k < kPanel<IO> / kDepth<IO>; ++k) {
        uint32_t b[kTiles][4];
#pragma unroll
        for (int j = 0; j < kTiles; ++j) right.load(b[j], j * 4, k);
#pragma unroll
        for (int i = 0; i < kStrips; ++i) {
          uint32_t a[4];
          left.load(a, kGroups * i, k);
#pragma unroll
          for (int j = 0; j <= tile_of(i); ++j) {
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

  // Rows that do not exist get zeros, so that they neither take nor give anything.
  DEVICE void load_row_terms() const {
    const int row = threadIdx.x;
    if (row >= kRows) return;
    const bool exists = row < chunk.steps;
    const int64_t at = rows.row(head, chunk) + (exists ? row : 0);
    const auto or_zero = [&](const float* x) { return exists ? x[at] : 0.f; };
    shared.u[row] = rows.u[at], shared.w[row] = rows.w[at];
    shared.past[row] = or_zero(rows.past), shared.future[row] = or_zero(rows.future);
    shared.inflow[row] = or_zero(rows.inflow), shared.outflow[row] = or_zero(rows.outflow);
    shared.start[row] = exists ? rows.start[chunk.row + row] : kRows;
  }

  // Writes E = decay_tj value_of(t)(sums), where t sees j, for all elements that are read later.
  // Calls body(strip, down, sum of two elements) for what the lane has of a row.
  template <typename ValueOf, typename Body>
  DEVICE void weigh(const PairSums& sums, const ValueOf& value_of, const Body& body) const {
    const float* decays = rows.tile_decay + rows.slot(head, slot) * rows.chunks.tiles();
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
        const int t = strip_row(i) + lane_row + 8 * down, row = t % kTile, start = shared.start[t];
        const float2 u = shared.u[t];
        const auto value = value_of(t);
        const auto sum = [&](int j, int half, int e) {
          return value(sums[of_pair(i, j)][half][2 * down + e]);
        };
        const auto put = [&](int j, int half, float first, float second) {
          store_pair(pair_tile(tile_of(i), j), row, pair_column(half) + 2 * quad, first, second);
          body(i, down, first + second);
        };
        float past = shared.past[t];
#pragma unroll
        for (int j = tile_of(i) - 1; j >= 0; --j) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float2 f = future[j][half];
            put(j, half, past * f.x * sum(j, half, 0), past * f.y * sum(j, half, 1));
          }
          past *= decay[j];
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (is_above(i, tile_of(i), half)) continue;
          const int column = pair_column(half) + 2 * quad;
          float e[2];
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const float2 w = shared.w[tile_of(i) * kTile + column + c];
            const float decay = exp2_approx((u.x + w.x) + (u.y + w.y));
            const bool seen = start <= column + c && column + c <= row;
            e[c] = seen ? decay * sum(tile_of(i), half, c) : 0.f;
          }
          put(tile_of(i), half, e[0], e[1]);
        }
      }
    }
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
        left.load(a, kGroups * i, k);
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

  // sums += E inner, or E^T inner; in diagonal tiles only what is not above the diagonal.
  template <bool kTransposed>
  DEVICE void multiply_triangle(OutputSums& sums, uint32_t inner) const {
    constexpr Lies kLies = kTransposed ? Lies::kAcross : Lies::kAlong;
    using Strip = Left<kLies, IO, kTile>;
    const auto strip = [&](int i) {
      // Row of the tile; with four groups there is no second one.
      const int row = i * 32 + group * 16;
      return Strip(pair_tile(0, 0), kTransposed ? 0 : row, kTransposed ? row : 0);
    };
    const Strip strips[2] = {strip(0), strip(kGroups == 2)};
    const Right<Lies::kAcross, IO, kRows> right(InnerTile{inner}, 0, part * (kColumns / 4));
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int k = 0; k < kTile / kDepth<IO>; ++k) {
        const int half = k * kDepth<IO> / 32;  // half of the tile's depth
        uint32_t b[kBlocks / 2][4];
#pragma unroll
        for (int c = 0; c < kBlocks / 2; ++c) right.load(b[c], c, j * (kTile / kDepth<IO>)+k);
#pragma unroll
        for (int i = 0; i < kStrips; ++i) {
          const int row = kTransposed ? j : tile_of(i), column = kTransposed ? tile_of(i) : j;
          // Halves of the tile.
          const int first = kGroups == 2 ? i % 2 : 0, last = kGroups == 2 ? i % 2 : 1;
          const bool above = kTransposed ? half < first : half > last;
          if (row < column || (row == column && above)) continue;
          Strip left = strips[i % (4 / kGroups)];
          left.lane += (row * (row + 1) / 2 + column) * kPairBytes;
          uint32_t a[4];
          left.load(a, 0, k);
          multiply_strip(sums[i], a, b);
        }
      }
    }
  }

  // ---- Outputs. ----

  // Calls body(strip, half, row, whether the row exists) for the lane's rows.
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

  // sums = outer (gain sums + add vector), for each row. Where outer is 0 the result is 0, even if
  // the state holds NaN.
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

  // Sets rows of padding to 0.
  template <typename X>
  DEVICE void clear_padding(void* to, int64_t width) const {
    X* rows = static_cast<X*>(to) + (chunk.row * p.H + head) * width;
    for (int row = chunk.steps; row < chunk.rows; ++row) {
      for (int64_t i = threadIdx.x; i < width; i += kThreads) rows[row * p.H * width + i] = X(0.f);
    }
  }

  static DEVICE int parts(int64_t width, int size) { return int((width + size - 1) / size); }
};

}  // namespace flashcell::cuda
