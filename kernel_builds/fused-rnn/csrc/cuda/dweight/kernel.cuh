// The gradient of the recurrent weight: dweight[g, n, j, k] = sum over rows (b, t) of dr[row, g, n,
// j] h_prev[row, n, k]. For one head this is a matrix of G D by D. A thread block computes a tile
// of it over a part of the rows. The rows are split until the blocks fill the GPU, and the partial
// sums of the splits are added in order.
#pragma once
#include "../engine.h"
#include "../run.h"
#include "../tensor_core.cuh"
#include "common/cuda/stages.cuh"

namespace flashcell::cuda {

// Rows of both operands are the depth of this product, the transpose of what the matrix instruction
// takes; ldmatrix transposes them as it loads.
DEVICE void load_transposed(uint32_t (&words)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address(shared_row)));
}

// A tile of 64 kWarpsM by 32 kWarpsN; each warp has 64 by 32 of it.
template <typename IO, bool kMatrix, int kWarpsM, int kWarpsN>
struct DweightTile {
  static constexpr int kM = 64 * kWarpsM, kN = 32 * kWarpsN, kThreads = 32 * kWarpsM * kWarpsN;
  // Rows of a stage, and stages in flight.
  static constexpr int kDepth = 64 / sizeof(IO), kMostStages = 4, kStages = kStagesOf<kMostStages>;
  static constexpr int kPad = 8;  // elements of padding, so that rows start in different banks
  static constexpr int kPitchM = kM + kPad, kPitchN = kN + kPad;
  static constexpr int kStage = kDepth * (kPitchM + kPitchN);
  static constexpr int shared_bytes(const Code& code) {
    return (code.is_turing() ? 1 : kMostStages) * kStage * int(sizeof(IO));
  }
};

// The sums of one thread, [8 m][8 n], and where they lie in the tile.
template <typename IO, bool kMatrix, int kWarpsM, int kWarpsN>
struct DweightSums {  // computed on tensor cores
  using Tile = DweightTile<IO, kMatrix, kWarpsM, kWarpsN>;
  float sums[4][4][4] = {};
  int lane = threadIdx.x % 32, r = lane / 4, q = lane % 4;
  int m0 = threadIdx.x / 32 / kWarpsN * 64, n0 = threadIdx.x / 32 % kWarpsN * 32;

  DEVICE int m(int i) const { return m0 + i * 8 + r; }
  DEVICE int n(int j) const { return n0 + j / 2 * 8 + 2 * q + j % 2; }
  DEVICE float value(int i, int j) const { return sums[i / 2][j / 2][i % 2 * 2 + j % 2]; }

  DEVICE void add(const IO* dr, const IO* h) {
    constexpr int kInstruction = 32 / sizeof(IO);  // rows of one matrix instruction
#pragma unroll
    for (int k = 0; k < Tile::kDepth; k += kInstruction) {
      uint32_t a[4][4], b[4][2];
      if constexpr (sizeof(IO) == 4) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const float x =
              dr[(k + q + i / 2 % 2 * 4) * Tile::kPitchM + m0 + i / 4 * 16 + i % 2 * 8 + r];
          a[i / 4][i % 4] = operand<IO>(__float_as_uint(x));
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float x = h[(k + q + j % 2 * 4) * Tile::kPitchN + n0 + j / 2 * 8 + r];
          b[j / 2][j % 2] = operand<IO>(__float_as_uint(x));
        }
      } else {
        const int row = k + lane % 8, odd = lane / 8 % 2 * 8, upper = lane / 16 * 8;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          load_transposed(a[i], dr + (row + upper) * Tile::kPitchM + m0 + i * 16 + odd);
        }
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          uint32_t words[4];
          load_transposed(words, h + (row + odd) * Tile::kPitchN + n0 + j * 8 + upper);
          b[j][0] = words[0], b[j][1] = words[1], b[j + 1][0] = words[2], b[j + 1][1] = words[3];
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) mma<IO>(sums[i][j], a[i], b[j][0], b[j][1]);
      }
    }
  }
};

template <int kWarpsM, int kWarpsN>
struct DweightSums<float, false, kWarpsM, kWarpsN> {  // computed in exact fp32
  using Tile = DweightTile<float, false, kWarpsM, kWarpsN>;
  static_assert(Tile::kM == 128 && Tile::kN == 128 && Tile::kThreads == 256);
  float sums[8][8] = {};
  int m0 = threadIdx.x / 16 * 4, n0 = threadIdx.x % 16 * 4;

  DEVICE int m(int i) const { return i / 4 * 64 + m0 + i % 4; }
  DEVICE int n(int j) const { return j / 4 * 64 + n0 + j % 4; }
  DEVICE float value(int i, int j) const { return sums[i][j]; }

  DEVICE void add(const float* dr, const float* h) {
#pragma unroll 1
    for (int k = 0; k < Tile::kDepth; ++k) {
      float4 a[2], b[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        a[i] = reinterpret_cast<const float4&>(dr[k * Tile::kPitchM + i * 64 + m0]);
        b[i] = reinterpret_cast<const float4&>(h[k * Tile::kPitchN + i * 64 + n0]);
      }
      const float left[8] = {a[0].x, a[0].y, a[0].z, a[0].w, a[1].x, a[1].y, a[1].z, a[1].w};
      const float right[8] = {b[0].x, b[0].y, b[0].z, b[0].w, b[1].x, b[1].y, b[1].z, b[1].w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[i][j] += left[i] * right[j];
      }
    }
  }
};

// Copies elements [first, first + kWidth) of a head's rows, one operand's part of a stage, to
// shared memory. A row of the head has D elements of every gate, gate_stride apart. A thread copies
// the same vector of every row.
template <typename IO, int kWidth, int kDepth, int kThreads, bool kVectors>
struct DweightSource {
  static constexpr int kVector = IoTraits<IO>::kVector, kVectorsOfRow = kWidth / kVector;
  static constexpr int kRowsAtOnce = kThreads / kVectorsOfRow, kPitch = kWidth + 8;
  static_assert(kDepth % kRowsAtOnce == 0);

  const IO* from;  // row 0 of the head
  int64_t row_stride, gate_stride;
  int D, elements;  // elements of a row: D times the gates
  int first = 0;

  DEVICE int64_t offset(int element) const {
    const int gate = element / D;
    return gate * gate_stride + (element - gate * D);
  }

  // Rows past `end` become zeros. Elements past the last one need no zeros: nothing uses their
  // sums.
  DEVICE void copy(IO* stage, int64_t row, int64_t end) const {
    const int place = threadIdx.x % kVectorsOfRow * kVector, element = first + place;
    if (element >= elements) return;
    const IO* source = from + (kVectors ? offset(element) : 0);
#pragma unroll
    for (int i = 0; i < kDepth; i += kRowsAtOnce) {
      const int k = i + threadIdx.x / kVectorsOfRow;
      IO* to = stage + k * kPitch + place;
      const bool inside = row + k < end;
      if (kVectors && inside) {
        copy_async(to, source + (row + k) * row_stride);
      } else {
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          const bool wanted = !kVectors && inside && element + e < elements;
          to[e] = wanted ? source[(row + k) * row_stride + offset(element + e)] : from_float<IO>(0);
        }
      }
    }
  }
};

struct DweightPlan {
  int tiles_m, tiles_n, splits;
  int64_t split_rows;
};

// `out` is dweight itself in io if there is one split, else partial sums, fp32 [splits, G, N, D,
// D].
template <typename IO, bool kMatrix, int kWarpsM, int kWarpsN, bool kVectors>
__global__ void __launch_bounds__(32 * kWarpsM * kWarpsN, kVectors ? 2 : 1) dweight_kernel(
    const __grid_constant__ DweightParams p, const DweightPlan plan) {
  using Tile = DweightTile<IO, kMatrix, kWarpsM, kWarpsN>;
  extern __shared__ uint4 dweight_shared[];
  IO* stages = reinterpret_cast<IO*>(dweight_shared);
  unsigned block = blockIdx.x;  // blocks that share rows are neighbours, so that they share L2
  const int first_n = block % plan.tiles_n * Tile::kN;
  const int first_m = (block /= plan.tiles_n) % plan.tiles_m * Tile::kM;
  const int64_t head = (block /= plan.tiles_m) % p.N, split = block / p.N;
  const int64_t begin = split * plan.split_rows, D = p.D, ND = p.N * D, row = p.row_heads * D;
  const int64_t end = min(begin + plan.split_rows, p.rows);

  const DweightSource<IO, Tile::kM, Tile::kDepth, Tile::kThreads, kVectors> dr{
      static_cast<const IO*>(p.dr) + head * (D + p.shift * p.G * row),
      p.G * row,
      row,
      int(D),
      int(p.G * D),
      first_m};
  const DweightSource<IO, Tile::kN, Tile::kDepth, Tile::kThreads, kVectors> h{
      static_cast<const IO*>(p.h_prev) + head * (D + p.shift * row),
      row,
      0,
      int(D),
      int(D),
      first_n};
  const int count = begin < end ? int((end - begin + Tile::kDepth - 1) / Tile::kDepth) : 0;
  const auto start = [&](int i) {
    if (i < count) {
      const int64_t from = begin + int64_t(i) * Tile::kDepth;
      IO* stage = stages + i % Tile::kStages * Tile::kStage;
      dr.copy(stage, from, end);
      h.copy(stage + Tile::kDepth * Tile::kPitchM, from, end);
    }
    copy_commit();
  };
  for (int i = 0; i < Tile::kStages - 1; ++i) start(i);

  DweightSums<IO, kMatrix, kWarpsM, kWarpsN> sums;
  for (int i = 0; i < count; ++i) {
    next_stage<Tile::kStages>([&] { start(i + Tile::kStages - 1); });
    const IO* stage = stages + i % Tile::kStages * Tile::kStage;
    sums.add(stage, stage + Tile::kDepth * Tile::kPitchM);
  }

#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int64_t m = first_m + sums.m(i), gate = m / D;
    if (m >= p.G * D) continue;
    const int64_t at = ((gate * p.N + head) * D + (m - gate * D)) * D;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int n = first_n + sums.n(j);
      if (n >= D) continue;
      if (plan.splits == 1) {
        static_cast<IO*>(p.dweight)[at + n] = from_float<IO>(sums.value(i, j));
      } else {
        static_cast<float*>(p.scratch)[split * p.G * ND * D + at + n] = sums.value(i, j);
      }
    }
  }
}

template <typename IO>
__global__ void __launch_bounds__(256) dweight_sum_kernel(const float* partial, int splits,
                                                          int64_t count, IO* out) {
  const int64_t i = blockIdx.x * int64_t(256) + threadIdx.x;
  if (i >= count) return;
  float sum = 0;
#pragma unroll 8
  for (int split = 0; split < splits; ++split) sum += partial[split * count + i];
  out[i] = from_float<IO>(sum);
}

}  // namespace flashcell::cuda
