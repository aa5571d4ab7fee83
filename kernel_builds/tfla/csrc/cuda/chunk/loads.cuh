// The loads of a thread block for one chunk of one head, and its shared memory. Loads run one stage
// ahead of the products, except on Turing (stages.cuh).
#pragma once
#include "../gates/rows.cuh"
#include "../run.h"
#include "common/cuda/stages.cuh"
#include "tile.cuh"

namespace flashcell::cuda {

template <typename IO>
struct Matrix {  // row-major, in global memory; reads past its rows and columns give zeros
  const IO* data;
  int64_t stride;
  int rows, columns;
};

template <typename IO, int kTiles>
struct ChunkLoads {
  // Four warps are a group. A group has every kGroups-th strip of 16 rows, and each of its warps a
  // quarter of the columns.
  static constexpr int kGroups = kTiles == 4 ? 4 : 2, kThreads = 128 * kGroups;
  static constexpr int kRows = kTile * kTiles, kStrips = kRows / 16 / kGroups;
  // Columns of an output that are computed at a time.
  static constexpr int kColumns = 2 * kPanel<IO>;
  static constexpr int kBlocks = kColumns / 4 / 8;  // blocks of 8 columns for each warp
  static constexpr int kMostStages = 2, kStages = kStagesOf<kMostStages>;
  // A part of a state, or a tile's rows.
  static constexpr int kSlot = kTile * kColumns * int(sizeof(IO));
  static constexpr int kPairBytes = Tile<IO, kTile>::bytes(kTile);
  static constexpr int kRowBytes = kRows * kPanelBytes;
  static constexpr int kStage = kTiles == 1 ? kRowBytes + kSlot : kTiles * kSlot;
  static_assert(2 * kRowBytes <= kStage && kRowBytes + kSlot <= kStage);

  using RowTile = Tile<IO, kRows>;       // rows of the chunk, one panel of the depth
  using PairTile = Tile<IO, kTile>;      // a tile of E
  using InnerTile = Tile<IO, kRows>;     // rows of the chunk, kColumns columns of them
  using StateRows = Tile<IO, kColumns>;  // kColumns rows of a state, one panel of the depth
  // Rows of a state for one panel of the depth, kColumns columns of them.
  using StateDepth = Tile<IO, kPanel<IO>>;

  struct Output {
    Matrix<IO> rows, state, inner;
    int depth, blocks;  // stages for the state, and blocks of columns
  };
  struct Shared {
    alignas(1024) char ring[kStages * kStage];
    char triangle[kTiles * (kTiles + 1) / 2][kPairBytes];
    union {
      struct {
        float2 u[kRows], w[kRows];
      };
      float by_part[4][kRows];  // sums of rows by warps; used when the pairs have been weighted
    };
    float past[kRows], future[kRows], inflow[kRows], outflow[kRows];
    int start[kRows];
    Matrix<IO> left, right;  // operands of the products of pairs
    Output outputs[2];
  };
  // Bytes of a Shared, or of a larger one that extends it.
  template <typename Extended>
  static constexpr int bytes(const Code& code) {
    return bytes_with_stages<Extended>(code, kStages, kMostStages, kStage);
  }

  const MlstmParams& p;
  const Rows& rows;
  Shared& shared;
  const Chunk chunk;
  const int64_t slot;
  const int head;
  const int group, part, quad, lane_row;  // the warp's, and the lane's
  const bool has_inner;                   // whether pairs are multiplied, and E with rows
  bool loads_inner;                       // whether E's right operand is loaded for the outputs
  int pair_steps = 0, outputs = 1, stage = 0, loads = 0;
  // Stages of q and k (inner rows of the outputs), loaded after the outputs, for the gates' flows.
  int flow_steps = 0;
  struct {
    int output, block, depth;
  } ahead{};  // the next part to load, after the rows of the pairs

  DEVICE ChunkLoads(const MlstmParams& params, const Rows& of_gates, Shared& memory, int64_t slot,
                    int head, bool has_inner)
      : p(params),
        rows(of_gates),
        shared(memory),
        chunk(of_gates.chunks.at(slot)),
        slot(slot),
        head(head),
        group(warp() / 4),
        part(warp() % 4),
        quad(threadIdx.x % 4),
        lane_row(threadIdx.x % 32 / 4),
        has_inner(has_inner),
        loads_inner(has_inner) {}

  DEVICE static int warp() { return __shfl_sync(~0u, int(threadIdx.x / 32), 0); }

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

  DEVICE static void load_pairs(uint32_t to, const Matrix<IO>& left, const Matrix<IO>& right,
                                int step) {
    load<kPanel<IO>>(RowTile{to}, left, 0, step * kPanel<IO>);
    load<kPanel<IO>>(RowTile{to + kRowBytes}, right, 0, step * kPanel<IO>);
  }

  // Starts loading the next stage of everything this thread block reads.
  template <bool kByDepth>
  DEVICE void issue() {
    const uint32_t to = shared_address(shared.ring) + loads % kStages * kStage;
    if (loads < pair_steps) {
      load_pairs(to, shared.left, shared.right, loads);
    } else if (ahead.output < outputs) {
      const Output& output = shared.outputs[ahead.output];
      const int column = ahead.block * kColumns, depth = ahead.depth * kPanel<IO>;
      if (ahead.depth == output.depth) {
        load<kColumns>(InnerTile{to}, output.inner, 0, column);
      } else {
        load<kPanel<IO>>(RowTile{to}, output.rows, 0, depth);
        if constexpr (kByDepth) {
          load<kColumns>(StateDepth{to + kRowBytes}, output.state, depth, column);
        } else {
          load<kPanel<IO>>(StateRows{to + kRowBytes}, output.state, column, depth);
        }
      }
      if (++ahead.depth == output.depth + loads_inner) ahead.depth = 0, ++ahead.block;
      skip_outputs();
    } else if (ahead.depth < flow_steps) {
      load_pairs(to, shared.outputs[1].inner, shared.outputs[0].inner, ahead.depth++);
    }
    ++loads;
    copy_commit();
  }
  // Skips outputs that are fully loaded, and those without anything to load.
  DEVICE void skip_outputs() {
    for (; ahead.output < outputs; ++ahead.output, ahead.block = 0) {
      const Output& output = shared.outputs[ahead.output];
      if (ahead.block < output.blocks && output.depth + loads_inner > 0) return;
    }
  }

  template <bool kByDepth>
  DEVICE void begin() {
    skip_outputs();
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) issue<kByDepth>();
  }
  template <bool kByDepth>
  DEVICE uint32_t next() {
    next_stage<kStages>([&] { issue<kByDepth>(); });
    return shared_address(shared.ring) + stage++ % kStages * kStage;
  }
};

// Bytes of shared memory for a chunk of `tiles` tiles: the ring, the triangle, and some values per
// row.
constexpr int chunk_bytes(int tiles, int io_bytes, int stages = 2) {
  const int ring = tiles == 1 ? 24 << 10 : tiles * (16 << 10);
  const int triangle = tiles * (tiles + 1) / 2 * kTile * kTile * io_bytes;
  return stages * ring + triangle + (2 << 10) + tiles * (4 << 10);
}
// Returns the number of steps of the longest chunk that fits in a thread block's shared memory.
inline int longest_chunk(int io_bytes, const Device& device) {
  const int stages = device.code.is_turing() ? 1 : 2;
  const auto fits = [&](int tiles) {
    return chunk_bytes(tiles, io_bytes, stages) <= device.shared_bytes;
  };
  return kTile * (fits(4) ? 4 : fits(2) ? 2 : 1);
}

}  // namespace flashcell::cuda
