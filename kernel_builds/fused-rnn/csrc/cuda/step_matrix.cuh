// The products of a step on tensor cores. Weights go from memory straight to the registers of the
// lanes that need them, every element once; the operand is staged in shared memory. A vector of the
// depth is whole in one lane: it feeds two matrix instructions, two words each, in an order of the
// depth that both operands share.
#pragma once
#include "step_tile.cuh"

namespace flashcell::cuda {

// Vectors [from, from + kChunk) of the operand of every column, to rows of kPitch vectors.
template <typename IO, int kChunk, int kPitch, int kThreads>
DEVICE void stage_operand(const Task& task, int from) {
  constexpr int kVector = Lane<IO>::kVector;
  const int columns = (task.columns + kColumns - 1) / kColumns * kColumns;
#pragma unroll 4
  for (int i = threadIdx.x; i < columns * kChunk; i += kThreads) {
    const int column = i / kChunk, v = i % kChunk;
    const int depth = (from + v) * kVector;
    const void* row = task.rows[column];
    Vector value = {};
    if (row != nullptr && depth < task.end) {
      int64_t at = depth;
      if (task.operand_gate != 0) {
        const int gate = depth / task.D;
        at = gate * task.operand_gate + (depth - gate * task.D);
      }
      value = load_operand<IO>(row, at, task.states);
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) value.word[w] = operand<IO>(value.word[w]);
    step_shared[column * kPitch + v] = value;
  }
}

// r[gate, unit] = weight[gate, unit, :] h. A warp multiplies 32 units of one gate; with the vectors
// 4 i + q of its rows, the four lanes of a row read 64 neighbouring bytes.
template <int kGates, typename IO, int kTiles>
struct ForwardMatrix : Partials<kGates, 8 * kTiles, 32, kGates == 1 ? 4 : 2> {
  using Base = Partials<kGates, 8 * kTiles, 32, kGates == 1 ? 4 : 2>;
  using Value = typename Lane<IO>::Value;
  static constexpr int kVector = Lane<IO>::kVector, kQuantum = 4 * kVector;
  static constexpr int kThreads = 32 * kGates * Base::kSlices;
  static constexpr int kSteps = 4;  // a warp's loads at once, of four vectors a row
  static constexpr int kChunk = kSteps * Base::kSlices * 4, kPitch = kChunk + 4;
  static constexpr int kStageBytes = Base::kSequences * kPitch * sizeof(Vector);
  static constexpr int kSharedBytes =
      kStageBytes > Base::kPartialBytes ? kStageBytes : Base::kPartialBytes;

  static DEVICE void run(const Task& task) {
    const int lane = threadIdx.x % 32, r = lane / 4, q = lane % 4;
    const int gate = threadIdx.x / 32 % kGates, slice = threadIdx.x / (32 * kGates);
    const IO* weight = static_cast<const IO*>(task.weight) + gate * task.weight_gate +
                       int64_t(task.unit + r) * task.D;
    float sums[2][kTiles][4] = {};
    for (int from = task.begin / kVector; from * kVector < task.end; from += kChunk) {
      Vector a[kSteps][2][2];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int depth = (from + (i * Base::kSlices + slice) * 4 + q) * kVector;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const bool inside = depth < task.end && task.unit + r + 8 * j < task.D;
          a[i][j / 2][j % 2] =
              inside ? load_vector(weight + int64_t(8 * j) * task.D + depth) : Vector{};
        }
      }
      if (from * kVector > task.begin) __syncthreads();
      stage_operand<IO, kChunk, kPitch, kThreads>(task, from);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int step = i * Base::kSlices + slice;
        if ((from + step * 4) * kVector >= task.end) break;
        uint32_t rows[2][2]
                     [4];  // of the tiles, by half of the vector: as the instruction wants them
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            rows[m][w / 2][w % 2 * 2] = operand<IO>(a[i][m][0].word[w]);
            rows[m][w / 2][w % 2 * 2 + 1] = operand<IO>(a[i][m][1].word[w]);
          }
        }
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          if (n * 8 >= task.columns) break;
          const Vector b = step_shared[(n * 8 + r) * kPitch + step * 4 + q];
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            mma<IO>(sums[m][n], rows[m][0], b.word[0], b.word[1]);
            mma<IO>(sums[m][n], rows[m][1], b.word[2], b.word[3]);
          }
        }
      }
    }
    __syncthreads();  // the partial sums take the place of the operand
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        *Base::at(slice, gate, n * 8 + 2 * q + i % 2, i / 2 * 8 + r) = sums[i / 4][n][i % 4];
      }
    }
  }
};

// sum over gates and j of weight[gate, j, unit] dr[gate, j], with the depth in (gate, j) order. A
// lane loads the same vector of units from as many rows of the weight as a vector of the operand
// has elements, so that eight lanes read 128 neighbouring bytes, and pairs the rows up itself.
template <int, typename IO, int kTiles>
struct BackwardMatrix : Partials<1, 8 * kTiles, 8 * Lane<IO>::kVector, 8> {
  using Base = Partials<1, 8 * kTiles, 8 * Lane<IO>::kVector, 8>;
  using Value = typename Lane<IO>::Value;
  static constexpr int kVector = Lane<IO>::kVector, kQuantum = 4 * kVector;
  static constexpr int kThreads = 32 * Base::kSlices;
  static constexpr int kSteps = 16 / kVector, kRowTiles = kVector / 2;
  static constexpr int kChunk = kSteps * Base::kSlices * 4, kPitch = kChunk + 4;
  static constexpr int kStageBytes = Base::kSequences * kPitch * sizeof(Vector);
  static constexpr int kSharedBytes =
      kStageBytes > Base::kPartialBytes ? kStageBytes : Base::kPartialBytes;

  static DEVICE void run(const Task& task) {
    const int lane = threadIdx.x % 32, r = lane / 4, q = lane % 4, slice = threadIdx.x / 32;
    const IO* weight = static_cast<const IO*>(task.weight) + task.unit + r * kVector;
    const bool inside = task.unit + r * kVector < task.D;
    float sums[kRowTiles][kTiles][4] = {};
    for (int from = task.begin / kVector; from * kVector < task.end; from += kChunk) {
      Vector a[kSteps][kVector];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int depth = (from + (i * Base::kSlices + slice) * 4 + q) * kVector;
        const int gate = depth / task.D;
        const IO* rows = weight + gate * task.weight_gate + int64_t(depth - gate * task.D) * task.D;
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          a[i][e] = inside && depth < task.end ? load_vector(rows + int64_t(e) * task.D) : Vector{};
        }
      }
      if (from * kVector > task.begin) __syncthreads();
      stage_operand<IO, kChunk, kPitch, kThreads>(task, from);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int step = i * Base::kSlices + slice;
        if ((from + step * 4) * kVector >= task.end) break;
        uint32_t rows[kRowTiles][2][4];
        transpose(rows, a[i]);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          if (n * 8 >= task.columns) break;
          const Vector b = step_shared[(n * 8 + r) * kPitch + step * 4 + q];
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            mma<IO>(sums[m][n], rows[m][0], b.word[0], b.word[1]);
            mma<IO>(sums[m][n], rows[m][1], b.word[2], b.word[3]);
          }
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        float* to = Base::at(slice, 0, n * 8 + 2 * q + column, r * kVector);
#pragma unroll
        for (int m = 0; m < kRowTiles; m += 2) {
          *reinterpret_cast<float4*>(to + 2 * m) =
              make_float4(sums[m][n][column], sums[m][n][2 + column], sums[m + 1][n][column],
                          sums[m + 1][n][2 + column]);
        }
      }
    }
  }

  // Row r of tile m is unit 2 m of the lane's vector, row r + 8 unit 2 m + 1.
  static DEVICE void transpose(uint32_t (&rows)[kRowTiles][2][4], const Vector (&a)[kVector]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        uint32_t even, odd;
        if constexpr (sizeof(IO) == 4) {
          even = operand<IO>(a[w].word[2 * m]), odd = operand<IO>(a[w].word[2 * m + 1]);
        } else {
          even = __byte_perm(a[2 * w].word[m], a[2 * w + 1].word[m], 0x5410);
          odd = __byte_perm(a[2 * w].word[m], a[2 * w + 1].word[m], 0x7632);
        }
        rows[m][w / 2][w % 2 * 2] = even, rows[m][w / 2][w % 2 * 2 + 1] = odd;
      }
    }
  }
};

}  // namespace flashcell::cuda
