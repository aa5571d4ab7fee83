// y = W x for few rows of x, as fast as W can be read: it is read once for every 16 rows.
//
// A thread block takes tiles of 16 rows of W, and its warps take pieces of the depth. Every warp
// copies its own pieces to shared memory, up to 512 bytes of a row at once, and waits for no other
// warp. Copies run ahead across tiles and start before the preceding kernel has ended, because no
// kernel of a decoding step writes weights. The order in which the depth is summed is free, so a
// lane's operands are 16 contiguous bytes of a row, where the layout of the matrix instruction
// would be 4 times 4. The few rows of x are the right operand, most of whose columns stay empty.
//
// A norm costs nothing: its weight multiplies x as it is loaded, and its factor the sums at the
// end. So does the scale of a row of 8 bits, which are widened exactly on their way to the matrix
// instruction (widen.cuh). Those of int4's groups come through shared memory, after the 128 bytes
// of a row that they belong to, and multiply the weights: the instruction adds four groups up.
#pragma once
#include "../launch.h"
#include "common/cuda/ptx/mma.cuh"
#include "common/cuda/ptx/programmatic_launch.cuh"
#include "linear.h"
#include "widen.cuh"

namespace flashcell::cuda {

extern __shared__ __align__(16) char memory[];

namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kRows = 16;    // rows of W in a tile
constexpr int kStep = 64;    // bytes of a row that four lanes take at once
constexpr int kColumns = 8;  // columns of the matrix instruction: rows of x
constexpr int kSums = kRows * kColumns;

// A piece of a tile: its 16 rows by kSteps steps of the depth; a warp loads kStages of them at
// once.
template <Format kFormat, int kSteps, int kStages>
struct Piece {
  static constexpr int kRowBytes = kStep * kSteps;
  static constexpr int kScaleBytes = kFormat == Format::kInt4 ? kRowBytes / 8 : 0;
  // Bytes from row to row, so that no two rows share a bank. Where 16-bit weights of the same call
  // use rings of int4, two do.
  static constexpr int kStride = kRowBytes + (kScaleBytes ? kScaleBytes : 64);
  static constexpr int kBytes = kRows * kStride, kRingBytes = kWarps * kStages * kBytes;
  static constexpr int kLanes = kRowBytes / 16;  // lanes that copy a row
  static constexpr int kRowsAtOnce = 32 / kLanes;
};
// A warp copies 512 bytes of a row at once, or 256 where a block has only 99 KB of shared memory:
// sm_86, sm_89, sm_120.
constexpr int kLongSteps = 8, kShortSteps = 4;
constexpr int kSharedOfLong = 163 << 10, kSharedOfShort = 99 << 10;
// A row of 8 bits is half as long, and 256 bytes of it meet as many values of x as a warp holds.
constexpr int kSharedOfEight = 227 << 10, kStagesOfEight = 4;
// So do 128 bytes of int4.
constexpr int kInt4Steps = 2, kInt4Stages = 8, kShortInt4Stages = 4;
// Turing's 64 KB hold 128 bytes of a row, and the sums of 8 rows of x.
constexpr int kTuringSteps = 2, kTuringStages = 2;
template <int kSteps, int kStages>
constexpr bool kForTuring = kSteps == kTuringSteps && kStages == kTuringStages;

DEVICE int smaller(int a, int b) { return a < b ? a : b; }
DEVICE float silu(float x) { return x / (1 + expf(-x)); }

// Returns word * weight, and adds the squares of the word's elements to `squares`.
template <typename IO>
DEVICE uint32_t weigh(uint32_t word, uint32_t weight, float& squares) {
  const float2 x = Pair<IO>{{word}}.floats(), w = Pair<IO>{{weight}}.floats();
  squares = fmaf(x.x, x.x, fmaf(x.y, x.y, squares));
  return Pair<IO>::of(x.x * w.x, x.y * w.y).word[0];
}

// The first row and column of a tile: 16 rows of one matrix, or 8 of each of two gated matrices, by
// up to 16 rows of x.
struct Place {
  int which, row, column;
};

DEVICE Place find(const LinearStepParams& p, int tile, int tiles, int columns) {
  Place place{0, tile % tiles, tile / tiles * columns};
  if (p.gated) {
    place.row *= kRows / 2;
    return place;
  }
  for (int own; place.row >= (own = int((p.linears[place.which].rows + kRows - 1) / kRows));) {
    place.row -= own, ++place.which;
  }
  place.row *= kRows;
  return place;
}

// Returns the bytes of a row of a matrix, which is of the format if it has scales.
template <Format kFormat>
DEVICE int bytes_of(const Linear& linear, int K) {
  if (kFormat == Format::kPlain || linear.scale == nullptr) return 2 * K;
  return kFormat == Format::kInt4 ? K / 2 : K;
}

// Returns the number of pieces of a row of a matrix.
template <Format kFormat, int kRowBytes>
DEVICE int pieces_of(const Linear& linear, int K) {
  return (bytes_of<kFormat>(linear, K) + kRowBytes - 1) / kRowBytes;
}

// Copies a warp's pieces, tile after tile, into its ring of kStages pieces.
template <Format kFormat, int kSteps, int kStages>
struct Copier {
  using Own = Piece<kFormat, kSteps, kStages>;
  const LinearStepParams& p;
  int tile, tiles, all, blocks, columns, first, piece = first, stage = 0;
  // The matrices of the tile's first 8 rows and of its last 8.
  const char *low = nullptr, *high = nullptr;
  const char *low_scale = nullptr, *high_scale = nullptr;  // of int4's groups, or null
  int row = 0, rows = 0, next = 0;  // first row, number of rows, and ninth row
  int pieces = 0;
  int64_t bytes = 0;  // of a row

  // Finds the rows of the tile, or of the next that has pieces for this warp.
  DEVICE void find_rows() {
    for (; tile < all; tile += blocks) {
      const Place place = find(p, tile, tiles, columns);
      const Linear& linear = p.linears[place.which];
      low = static_cast<const char*>(linear.weight);
      high = p.gated ? static_cast<const char*>(p.linears[1].weight) : low;
      row = place.row, rows = int(linear.rows), next = p.gated ? row : row + kRows / 2;
      bytes = bytes_of<kFormat>(linear, int(p.K));
      if constexpr (kFormat == Format::kInt4) {
        low_scale = static_cast<const char*>(linear.scale);
        high_scale = p.gated ? static_cast<const char*>(p.linears[1].scale) : low_scale;
      }
      pieces = pieces_of<kFormat, Own::kRowBytes>(linear, int(p.K));
      if (first < pieces) return;
    }
  }
  DEVICE void copy(uint32_t ring) {
    if (tile < all) {
      const int lane = threadIdx.x % 32, lane_row = lane / Own::kLanes;
      const int vector = lane % Own::kLanes, at = piece * Own::kRowBytes + vector * 16;
      const bool exists = at < bytes;
      uint32_t to = ring + stage * Own::kBytes + lane_row * Own::kStride + vector * 16;
#pragma unroll
      for (int r = 0; r < kRows; r += Own::kRowsAtOnce, to += Own::kRowsAtOnce * Own::kStride) {
        const int own = r + lane_row, from = row_of(own);
        const char* source = (own < kRows / 2 ? low : high) + from * bytes;
        copy_async_or_zero(to, exists ? source + at : source, exists);
      }
      if constexpr (kFormat == Format::kInt4) {
        if (low_scale != nullptr) copy_scales(ring + stage * Own::kBytes + Own::kRowBytes);
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
      if ((piece += kWarps) >= pieces) {
        piece = first, tile += blocks;
        find_rows();
      }
    }
    copy_commit();
  }
  // Returns the row of its matrix that is row `own` of the tile; rows past the end repeat the last.
  DEVICE int row_of(int own) const {
    return smaller(own < kRows / 2 ? row + own : next + own - kRows / 2, rows - 1);
  }
  // Copies the factors of the piece's groups, two at a time.
  DEVICE void copy_scales(uint32_t to) {
    constexpr int kWords = Own::kScaleBytes / 4;  // of a row
    const int64_t all_bytes = bytes / 8;
#pragma unroll
    for (int i = threadIdx.x % 32; i < kRows * kWords; i += 32) {
      const int own = i / kWords, word = i % kWords * 4, at = piece * Own::kScaleBytes + word;
      const char* source = (own < kRows / 2 ? low_scale : high_scale) + row_of(own) * all_bytes;
      const bool exists = at < all_bytes;
      copy_word_or_zero(to + own * Own::kStride + word, exists ? source + at : source, exists);
    }
  }
};

// Adds the product of a warp's piece, W at `from`, with x from value k on to d, and the squares of
// that part of x. kFormat says what the matrix of this tile is, Own what the ring is for.
template <typename IO, Format kFormat, typename Own, int kSteps, int kStages, int kTiles,
          bool kNorm>
DEVICE void multiply(const LinearStepParams& p, int column, int B, int k, const char* from,
                     float (&d)[kTiles][4], float (&square)[kTiles]) {
  // 16 bytes of W meet so many vectors of x.
  constexpr bool kInt4 = kFormat == Format::kInt4;
  constexpr int kVectors = kFormat == Format::kPlain ? 1 : kInt4 ? 4 : 2, kValues = 8 * kVectors;
  const int lane = threadIdx.x % 32, row = lane / 4, quarter = lane % 4;
  // The lane's part of step s: the factors of a lane's groups are neighbours.
  const auto part = [&](int s) { return kInt4 ? kSteps * quarter + s : 4 * s + quarter; };
  const IO* x = static_cast<const IO*>(p.x) + column * p.x_stride;
  uint4 v[kSteps][kVectors][kTiles] = {};
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int at = k + part(s) * kValues + 8 * j;
      const bool exists = at < int(p.K);
      uint4 scale{};
      if (kNorm && exists) {
        scale = *reinterpret_cast<const uint4*>(static_cast<const IO*>(p.norm) + at);
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int own = t * kColumns + row;
        uint4& word = v[s][j][t];
        if (own < B && exists) word = *reinterpret_cast<const uint4*>(x + own * p.x_stride + at);
        if constexpr (kNorm) {
          word.x = weigh<IO>(word.x, scale.x, square[t]);
          word.y = weigh<IO>(word.y, scale.y, square[t]);
          word.z = weigh<IO>(word.z, scale.z, square[t]);
          word.w = weigh<IO>(word.w, scale.w, square[t]);
        }
      }
    }
  }
  copy_wait<kStages - 1>();
  __syncwarp();
  from += row * Own::kStride;
  const char* const from_high = from + kRows / 2 * Own::kStride;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const uint4 low = *reinterpret_cast<const uint4*>(from + part(s) * 16);
    const uint4 high = *reinterpret_cast<const uint4*>(from_high + part(s) * 16);
    if constexpr (kFormat == Format::kPlain) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        mma<IO>(d[t], {low.x, high.x, low.y, high.y}, v[s][0][t].x, v[s][0][t].y);
        mma<IO>(d[t], {low.z, high.z, low.w, high.w}, v[s][0][t].z, v[s][0][t].w);
      }
    } else {
      const uint32_t lows[] = {low.x, low.y, low.z, low.w};
      const uint32_t highs[] = {high.x, high.y, high.z, high.w};
      uint32_t low_scale = 0, high_scale = 0;
      if constexpr (kInt4) {
        const int at = Own::kRowBytes + part(s) * 2;
        low_scale = twice_scale<IO>(*reinterpret_cast<const uint16_t*>(from + at));
        high_scale = twice_scale<IO>(*reinterpret_cast<const uint16_t*>(from_high + at));
      }
      // four weights of each row
      const auto add = [&](uint2 a, uint2 b, int i) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const uint4& word = v[s][i / 2][t];
          mma<IO>(d[t], {a.x, b.x, a.y, b.y}, i % 2 ? word.z : word.x, i % 2 ? word.w : word.y);
        }
      };
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kInt4) {
          add(widen_int4<IO>(lows[i], low_scale), widen_int4<IO>(highs[i], high_scale), i);
          add(widen_int4<IO>(lows[i] >> 4, low_scale), widen_int4<IO>(highs[i] >> 4, high_scale),
              4 + i);
        } else {
          add(widen<IO, kFormat>(lows[i]), widen<IO, kFormat>(highs[i]), i);
        }
      }
    }
  }
}

template <typename IO, Format kFormat, int kSteps, int kStages, int kTiles, bool kNorm>
__global__ void __launch_bounds__(kThreads, 1) linear_step_kernel(
    const __grid_constant__ LinearStepParams p, int tiles, int all, int blocks) {
  __shared__ float sums[2][kWarps][kTiles * kSums];
  __shared__ float squares[2][kWarps][kTiles * kColumns];
  using Own = Piece<kFormat, kSteps, kStages>;
  static_assert(Own::kRingBytes + int(sizeof sums + sizeof squares) <=
                (kForTuring<kSteps, kStages>                             ? kTuringSharedBytes
                 : kSteps == kLongSteps || kStages == kInt4Stages        ? kSharedOfLong
                 : kFormat != Format::kInt4 && kStages == kStagesOfEight ? kSharedOfEight
                                                                         : kSharedOfShort));
  if constexpr (kIsTuring != kForTuring<kSteps, kStages>) {
    __trap();  // run_linear_step chooses by the code
    return;
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quarter = lane % 4;
  const int K = int(p.K);
  const char* ring = memory + warp * kStages * Own::kBytes;
  const uint32_t ring_address = shared_address(ring);

  Copier<kFormat, kSteps, kStages> copier{p,      int(blockIdx.x),   tiles, all,
                                          blocks, kTiles * kColumns, warp};
  copier.find_rows();
  for (int s = 0; s < kStages; ++s) copier.copy(ring_address);
  pdl_wait();
  pdl_launch_dependents();

  int stage = 0, side = 0;
  for (int tile = blockIdx.x; tile < all; tile += blocks, side ^= 1) {
    const Place place = find(p, tile, tiles, kTiles * kColumns);
    const int B = smaller(int(p.B) - place.column, kTiles * kColumns);
    const bool scaled = kFormat != Format::kPlain && p.linears[place.which].scale != nullptr;
    const int pieces = pieces_of<kFormat, Own::kRowBytes>(p.linears[place.which], K);
    float d[kTiles][4] = {}, square[kTiles] = {};
    for (int piece = warp; piece < pieces; piece += kWarps) {
      const char* from = ring + stage * Own::kBytes;
      const int at = piece * Own::kRowBytes;
      if (scaled) {
        const int k = kFormat == Format::kInt4 ? 2 * at : at;
        multiply<IO, kFormat, Own, kSteps, kStages, kTiles, kNorm>(p, place.column, B, k, from, d,
                                                                   square);
      } else {
        multiply<IO, Format::kPlain, Own, kSteps, kStages, kTiles, kNorm>(p, place.column, B,
                                                                          at / 2, from, d, square);
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
      __syncwarp();
      copier.copy(ring_address);
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      *reinterpret_cast<float4*>(&sums[side][warp][t * kSums + 4 * lane]) =
          make_float4(d[t][0], d[t][1], d[t][2], d[t][3]);
      if constexpr (kNorm) {
        square[t] += __shfl_xor_sync(~0u, square[t], 1);
        square[t] += __shfl_xor_sync(~0u, square[t], 2);
        if (quarter == 0) squares[side][warp][t * kColumns + row] = square[t];
      }
    }
    __syncthreads();

    const int at = threadIdx.x;  // one output per thread, which lane at % 128 / 4 holds
    if (at >= kTiles * kSums) continue;
    const Linear& linear = p.linears[place.which];
    const int element = at % 4, column = at / kSums * kColumns + at / 4 % 4 * 2 + element % 2;
    const int r = place.row + at % kSums / 16 + (p.gated ? 0 : element / 2 * (kRows / 2));
    if (column >= B || r >= linear.rows || (p.gated && element >= 2)) continue;
    float value = 0, gated = 0, square_sum = 0;
#pragma unroll
    for (int other = 0; other < kWarps; ++other) {
      value += sums[side][other][at];
      if (p.gated) gated += sums[side][other][at + 2];
      if constexpr (kNorm) square_sum += squares[side][other][column];
    }
    if constexpr (kNorm) {
      const float factor = rsqrtf(square_sum / float(p.K) + float(p.eps));
      value *= factor, gated *= factor;
    }
    if (scaled && kFormat != Format::kInt4) {
      value *= static_cast<const float*>(linear.scale)[r];
      if (p.gated) gated *= static_cast<const float*>(p.linears[1].scale)[r];
    }
    if (linear.bias != nullptr) value += to_float(static_cast<const IO*>(linear.bias)[r]);
    const int64_t b = place.column + column, out = b * linear.out_stride + r;
    if (linear.capped) {
      const float cap = float(p.cap);
      static_cast<float*>(linear.out)[out] = cap > 0 ? cap * tanhf(value / cap) : value;
      continue;
    }
    if (p.gated) value = silu(value) * gated;
    if (p.residual != nullptr) {
      value += to_float(static_cast<const IO*>(p.residual)[b * p.residual_stride + r]);
    }
    static_cast<IO*>(linear.out)[out] = from_float<IO>(value);
  }
}

template <typename IO, Format kFormat, int kSteps, int kStages = 2>
void launch_linear_step(const LinearStepParams& p, const Device& device, cudaStream_t stream) {
  int64_t tiles = 0;
  const int rows = p.gated ? kRows / 2 : kRows;
  for (int s = 0; s < (p.gated ? 1 : p.count); ++s) tiles += (p.linears[s].rows + rows - 1) / rows;
  // Two passes over a small matrix, which stays in L2, are better than idle SMs.
  const int64_t wide = 2 * kColumns;
  constexpr bool kHasWide = !kForTuring<kSteps, kStages>;
  const bool once = kHasWide && p.B > kColumns && (p.B + wide - 1) / wide * tiles >= device.sms;
  const int64_t columns = once ? wide : kColumns;
  const int64_t all = (p.B + columns - 1) / columns * tiles;
  const int64_t blocks = all < device.sms ? all : device.sms;
  const Grid grid{blocks, kThreads, Piece<kFormat, kSteps, kStages>::kRingBytes, stream,
                  device.code.arch >= 90};
  const bool norm = p.norm != nullptr && p.K > 0;  // zero columns have no mean
  constexpr int kMost = kHasWide ? 2 : 1;
  const auto kernel = once ? (norm ? linear_step_kernel<IO, kFormat, kSteps, kStages, kMost, true>
                                   : linear_step_kernel<IO, kFormat, kSteps, kStages, kMost, false>)
                           : (norm ? linear_step_kernel<IO, kFormat, kSteps, kStages, 1, true>
                                   : linear_step_kernel<IO, kFormat, kSteps, kStages, 1, false>);
  launch(kernel, grid, p, int(tiles), int(all), int(blocks));
}

}  // namespace

}  // namespace flashcell::cuda
