// Products of one chunk of one head, of a thread block: of all pairs of rows (q k, or dh v), which
// are weighed in registers to a triangle E of tiles in shared memory, and of rows with a state and
// of E with rows (C q + E v, and the like). Loads run a stage ahead.
#pragma once
#include "rows.cuh"
#include "tile.cuh"

namespace flashcell::cuda {

template <typename IO>
struct Matrix {  // row-major, in global memory; beyond its rows and columns are zeros
  const IO* data;
  int64_t stride;
  int rows, columns;
};

template <typename IO, int kTiles>
struct ChunkProducts {
  static constexpr int kThreads = 256, kRows = kTile * kTiles, kStrips = 2 * kTiles;
  static constexpr int kColumns = 2 * kPanel<IO>;   // of an output at a time
  static constexpr int kBlocks = kColumns / 4 / 8;  // of 8 columns, of a warp
  static constexpr int kStages = 2;
  static constexpr int kSlot =
      kTile * kColumns * int(sizeof(IO));  // what one matrix takes at least
  static constexpr int kRowBytes = kRows * kPanelBytes, kStage = kTiles * kSlot;
  static_assert(2 * kRowBytes <= kStage);

  using RowTile = Tile<IO, kRows>;          // rows of the chunk, one panel of depth
  using PairTile = Tile<IO, kTile>;         // of E
  using InnerTile = Tile<IO, kTile>;        // 64 rows, kColumns of them
  using StateRows = Tile<IO, kColumns>;     // kColumns rows of a state, one panel of depth
  using StateDepth = Tile<IO, kPanel<IO>>;  // one panel's rows of a state, kColumns of them

  struct Output {
    Matrix<IO> rows, state, inner;
    int depth, blocks;  // steps through the state, blocks of columns
  };
  struct Shared {
    alignas(1024) char ring[kStages * kStage];
    char triangle[kTiles * (kTiles + 1) / 2][PairTile::bytes(kTile)];
    float2 u[kRows], w[kRows];
    float past[kRows], future[kRows];
    int start[kRows];
    Matrix<IO> left, right;  // of the products of pairs
    Output outputs[2];
  };

  const MlstmParams& p;
  const Rows& rows;
  Shared& shared;
  const Chunk chunk;
  const int64_t slot;
  const int head;
  const int group, part, quad, lane_row;  // of the warp: strips 2 i + group, columns; of the lane
  const bool has_inner;                   // products of pairs, and of E
  int pair_steps = 0, outputs = 1, stage = 0;

  DEVICE ChunkProducts(const MlstmParams& params, const Rows& of_gates, Shared& memory,
                       int64_t slot, int head, bool has_inner)
      : p(params),
        rows(of_gates),
        shared(memory),
        chunk(of_gates.chunks.at(slot)),
        slot(slot),
        head(head),
        group(threadIdx.x / 128),
        part(threadIdx.x / 32 % 4),
        quad(threadIdx.x % 4),
        lane_row(threadIdx.x % 32 / 4),
        has_inner(has_inner) {}

  // ---- Loads: a stage ahead of the products. ----

  DEVICE Matrix<IO> matrix(const Strided& x, int64_t width) const {
    const int64_t b = chunk.row / p.T, t = chunk.row % p.T;
    return {static_cast<const IO*>(x.data) + b * x.batch + t * x.time + head * x.head, x.time,
            chunk.steps, int(width)};
  }
  DEVICE Matrix<IO> state(const void* states) const {
    const int64_t size = p.K * p.V;
    return {static_cast<const IO*>(states) + rows.slot(head, slot) * size, p.V, int(p.K), int(p.V)};
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
      const int first = (shared.outputs[0].depth + has_inner) * shared.outputs[0].blocks;
      const bool second = index >= first;
      if (second) index -= first;
      const Output& output = shared.outputs[second];
      const int steps = output.depth + has_inner;
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

  // ---- Products. ----

  // Strip i of the warp: 16 rows, number sub(i) of tile i / 2. Neighbouring strips are of different
  // groups, so that each has half of any triangle.
  DEVICE int sub(int i) const { return i % 2 * 2 + group; }
  DEVICE int strip_row(int i) const { return i / 2 * kTile + sub(i) * 16; }
  DEVICE bool is_empty(int i) const { return strip_row(i) >= chunk.steps; }
  // Of a tile of pairs the warp takes 16 columns, in every column of tiles others: an equal share
  // of the diagonal ones.
  DEVICE int block_of(int j) const { return (part + j) % 4; }
  DEVICE bool is_above(int i, int j) const { return j == i / 2 && block_of(j) > sub(i); }

  using PairSums = Sums<kTiles*(kTiles + 1), 2>;  // strip i's of tile j at of_pair(i, j)
  static constexpr DEVICE int of_pair(int i, int j) { return (i / 2 + i % 2) * (i / 2 + 1) + j; }

  template <bool kByDepth>
  DEVICE void multiply_pairs(PairSums& sums) {
    for (int s = 0; s < pair_steps; ++s) {
      const uint32_t rows = next<kByDepth>();
      const Left<Lies::kAlong, IO, kRows> left(RowTile{rows}, group * 16, 0);
      const Right<Lies::kAlong, IO, kRows> right(RowTile{rows + kRowBytes}, 0, 0);
#pragma unroll
      for (int k = 0; k < kPanel<IO> / kDepth<IO>; ++k) {
        uint32_t b[kTiles][4];
#pragma unroll
        for (int j = 0; j < kTiles; ++j) right.load(b[j], j * 4 + block_of(j), k);
#pragma unroll
        for (int i = 0; i < kStrips; ++i) {
          if (is_empty(i)) break;
          uint32_t a[4];
          left.load(a, 2 * i, k);
#pragma unroll
          for (int j = 0; j <= i / 2; ++j) {
            if (is_above(i, j)) continue;
            multiply_piece<IO>(sums[of_pair(i, j)][0], a, b[j][0], b[j][1]);
            multiply_piece<IO>(sums[of_pair(i, j)][1], a, b[j][2], b[j][3]);
          }
        }
      }
    }
  }

  DEVICE PairTile pair_tile(int row, int column) const {
    return {shared_address(shared.triangle[row * (row + 1) / 2 + column])};
  }

  DEVICE void load_row_terms() const {
    const int row = threadIdx.x;
    if (row >= kRows) return;
    const int64_t at = rows.row(head, chunk) + row;
    const bool exists = row < chunk.steps;
    shared.u[row] = exists ? rows.u[at] : float2{0, 0};
    shared.w[row] = exists ? rows.w[at] : float2{0, 0};
    shared.past[row] = exists ? rows.past[at] : 0.f;
    shared.future[row] = exists ? rows.future[at] : 0.f;
    shared.start[row] = exists ? rows.start[chunk.row + row] : kRows;
  }

  // E = decay_tj value(t, sums), where t sees j; body(strip, half, e) sees what a lane has of a
  // row.
  template <typename Value, typename Body>
  DEVICE void weigh(const PairSums& sums, const Value& value, const Body& body) const {
    const float* decays = rows.tile_decay + rows.slot(head, slot) * rows.chunks.tiles();
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      float between = 1;  // decay of the tiles between j and i / 2
#pragma unroll
      for (int i = 2 * j; i < kStrips; ++i) {
        if (is_empty(i)) break;
        if (i % 2 == 0 && i / 2 > j + 1) between *= decays[i / 2 - 1];
        if (is_above(i, j)) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = sub(i) * 16 + lane_row + 8 * half, t = i / 2 * kTile + row;
          const float2 u = shared.u[t];
          const float past = shared.past[t] * between;
          const int start = shared.start[t];
#pragma unroll
          for (int block = 0; block < 2; ++block) {
            const int column = block_of(j) * 16 + block * 8 + 2 * quad;
            float e[2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              const float x = value(t, sums[of_pair(i, j)][block][2 * half + c]);
              if (i / 2 == j) {
                const float2 w = shared.w[j * kTile + column + c];
                const bool seen = start <= column + c && column + c <= row;
                e[c] = seen ? exp2f((u.x + w.x) + (u.y + w.y)) * x : 0.f;
              } else {
                e[c] = past * shared.future[j * kTile + column + c] * x;
              }
            }
            store_pair(pair_tile(i / 2, j), row, column, e[0], e[1]);
            body(i, half, e[0] + e[1]);
          }
        }
      }
    }
  }

  using OutputSums = Sums<kStrips, kBlocks>;

  // also(i, a, k) sees the left words of strip i, step k.
  template <bool kByDepth, typename Also>
  DEVICE void multiply_state(OutputSums& sums, uint32_t rows, const Also& also) const {
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
        if (is_empty(i)) break;
        uint32_t a[4];
        left.load(a, 2 * i, k);
        multiply_strip(sums[i], a, b);
        also(i, a, k);
      }
    }
  }
  template <bool kByDepth>
  DEVICE void multiply_state(OutputSums& sums, uint32_t rows) const {
    multiply_state<kByDepth>(sums, rows, [](int, const uint32_t (&)[4], int) {});
  }

  DEVICE static void multiply_strip(float (&sums)[kBlocks][4], const uint32_t (&a)[4],
                                    const uint32_t (&b)[kBlocks / 2][4]) {
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) {
      multiply_piece<IO>(sums[c], a, b[c / 2][c % 2 * 2], b[c / 2][c % 2 * 2 + 1]);
    }
  }

  // sums += E inner, or E^T inner. What E does not have is neither written nor read.
  template <bool kTransposed>
  DEVICE void multiply_triangle(OutputSums& sums, uint32_t inner) const {
#pragma unroll 1
    for (int j = 0; j < kTiles && j * kTile < chunk.steps; ++j) {
      const Right<Lies::kAcross, IO, kTile> right(InnerTile{inner + j * kSlot}, 0,
                                                  part * (kColumns / 4));
#pragma unroll
      for (int k = 0; k < kTile / kDepth<IO>; ++k) {
        const int block = k * kDepth<IO> / 16;  // of 16 rows of depth
        if (j * kTile + 16 * block >= chunk.steps) break;
        uint32_t b[kBlocks / 2][4];
#pragma unroll
        for (int c = 0; c < kBlocks / 2; ++c) right.load(b[c], c, k);
#pragma unroll
        for (int i = 0; i < kStrips; ++i) {
          const int ahead = (i / 2 - j) * 4 + sub(i) - block;  // by so many strips is t after j
          if (is_empty(i) || (kTransposed ? ahead > 0 : ahead < 0)) continue;
          uint32_t a[4];
          if constexpr (kTransposed) {
            Left<Lies::kAcross, IO, kTile>(pair_tile(j, i / 2), 0, sub(i) * 16).load(a, 0, k);
          } else {
            Left<Lies::kAlong, IO, kTile>(pair_tile(i / 2, j), sub(i) * 16, 0).load(a, 0, k);
          }
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
      if (is_empty(i)) break;
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

  // sums = outer (gain sums + add vector), row by row; 0 where outer is 0, whatever the state
  // holds.
  template <typename FactorsOf>
  DEVICE void scale(OutputSums& sums, const float* vector, int first, int width,
                    const FactorsOf& factors_of) const {
    for_rows([&](int i, int half, int row, bool exists) {
      const Factors f = exists ? factors_of(row) : Factors{};
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) {
        const int column = first + 8 * c + 2 * quad;
        const bool has_vector = vector && column < width;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& sum = sums[i][c][2 * half + e];
          const float added = has_vector ? f.add * vector[column + e] : 0.f;
          sum = f.outer == 0 ? 0.f : f.outer * fmaf(f.gain, sum, added);
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

  // Rows of padding are 0.
  template <typename X>
  DEVICE void clear_padding(void* to, int64_t width) const {
    X* rows = static_cast<X*>(to) + (chunk.row * p.H + head) * width;
    for (int row = chunk.steps; row < chunk.rows; ++row) {
      for (int64_t i = threadIdx.x; i < width; i += kThreads) rows[row * p.H * width + i] = X(0.f);
    }
  }

  static DEVICE int parts(int64_t width, int size) { return int((width + size - 1) / size); }
};

// Steps of the longest chunk whose thread blocks fit in `shared_bytes`, which are this and at most
// 16 KB.
inline int longest_chunk(int io_bytes, int shared_bytes) {
  const auto bytes = [&](int tiles) {
    return (2 * tiles * 256 + tiles * (tiles + 1) / 2 * 64 * io_bytes) * 64 + (16 << 10);
  };
  return bytes(4) <= shared_bytes ? 4 * kTile : bytes(2) <= shared_bytes ? 2 * kTile : kTile;
}

}  // namespace flashcell::cuda
