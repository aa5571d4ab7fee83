// The products of a step on tensor cores. Weights go straight from memory to the registers of the
// lanes that need them, each element once; the operand is staged in shared memory. A lane holds
// whole vectors along the depth: each feeds two matrix instructions with two words each. This
// permutes the depth, in the same way for both operands.
#pragma once
#include "tile.cuh"

namespace flashcell::cuda {

// Clamps an index so that weight loads need no condition: the compiler waits for each conditional
// load before it starts the next. An index outside becomes the last one inside, and its sums are
// not used.
DEVICE int within(int index, int end, int count) { return max(min(index, end - count), 0); }

// Copies vectors [from, from + kChunk) of the operand of every column to shared memory, in rows of
// kPitch vectors. A thread starts all its loads before it waits for the first.
template <typename IO, int kMost, int kChunk, int kPitch, int kThreads, bool kStates>
DEVICE void stage_operand(const Task& task, int from) {
  constexpr int kVector = IoTraits<IO>::kVector, kLanes = 16, kLoads = kChunk / kLanes;
  constexpr int kStep = kThreads / kLanes, kPasses = (kMost + kStep - 1) / kStep;
  constexpr int kParts = kStates ? kVector / 4 : 1;  // loads per vector: states are fp32
  constexpr int kAtOnce = kLoads * kParts < 16 ? 16 / (kLoads * kParts) : 1;
  constexpr int kGroup = kAtOnce < kPasses ? kAtOnce : kPasses;
  static_assert(kChunk % kLanes == 0);
  const int lane = threadIdx.x % kLanes, first = threadIdx.x / kLanes;
  const int columns = (task.columns + kColumns - 1) / kColumns * kColumns;
  bool inside[kLoads];
  int64_t at[kLoads];
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
    const int depth = (from + j * kLanes + lane) * kVector;
    inside[j] = depth < task.end, at[j] = depth;
    if (task.operand_gate != 0) {
      const int gate = depth / task.D;
      at[j] = gate * task.operand_gate + (depth - gate * task.D);
    }
  }
  for (int start = 0; start < kPasses * kStep; start += kGroup * kStep) {
    Vector values[kGroup][kLoads][kParts];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int column = start + i * kStep + first;
      const void* row = column < columns ? task.places[column].operand : nullptr;
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const char* bytes = static_cast<const char*>(row) + at[j] * (kStates ? 4 : sizeof(IO));
          values[i][j][part] =
              load_vector(row != nullptr && inside[j], bytes + part * sizeof(Vector));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int column = start + i * kStep + first;
      if (column >= columns) break;
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        Vector value = values[i][j][0];
        if constexpr (kStates) value = round_states<IO>(values[i][j]);
#pragma unroll
        for (int w = 0; w < 4; ++w) value.word[w] = operand<IO>(value.word[w]);
        step_shared[column * kPitch + j * kLanes + lane] = value;
      }
    }
  }
}

// sums[m][n] += rows[m] times the lane's vector `b` of tile n. Columns are checked once per four
// tiles, so that their reads overlap. Columns past the last hold garbage, and their sums are not
// used.
template <typename IO, int kRowTiles, int kTiles>
DEVICE void multiply(float (&sums)[kRowTiles][kTiles][4], const uint32_t (&rows)[kRowTiles][2][4],
                     const Vector* b, int pitch, int columns) {
  constexpr int kGroup = kTiles < 4 ? kTiles : 4;
#pragma unroll
  for (int first = 0; first < kTiles; first += kGroup) {
    if (first * kColumns >= columns) break;
    Vector vectors[kGroup];
#pragma unroll
    for (int n = 0; n < kGroup; ++n) vectors[n] = b[(first + n) * kColumns * pitch];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < kGroup; ++n) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          mma<IO>(sums[m][first + n], rows[m][half], vectors[n].word[2 * half],
                  vectors[n].word[2 * half + 1]);
        }
      }
    }
  }
}

// r[gate, unit] = weight[gate, unit, :] h. A warp multiplies 32 units of one gate. The four lanes
// of a row take the vectors 4 i + q, and so read 64 contiguous bytes.
template <int kGates, typename IO, int kTiles>
struct ForwardMatrix : Partials<kGates, 8 * kTiles, 32, kGates == 1 ? 4 : 1> {
  using Base = Partials<kGates, 8 * kTiles, 32, kGates == 1 ? 4 : 1>;
  static constexpr int kDeep = kGates == 1 ? 4 : 2;  // warps that share the depth
  static constexpr int kResident = 1, kCells = 2;
  using Value = typename IoTraits<IO>::Value;
  static constexpr int kVector = IoTraits<IO>::kVector, kQuantum = 4 * kVector;
  static constexpr int kThreads = 32 * kGates * kDeep;
  // Steps whose weights a warp loads at once, of four vectors a row.
  static constexpr int kSteps = 4;
  static constexpr int kChunk = kSteps * kDeep * 4, kPitch = kChunk + 4;
  static constexpr int kStageBytes = Base::kSequences * kPitch * sizeof(Vector);
  static constexpr int kSharedBytes =
      kStageBytes > Base::kPartialBytes ? kStageBytes : Base::kPartialBytes;

  struct Weights {  // the weights of one chunk, in the registers of the lanes that multiply them
    Vector vector[kSteps][2][2];

    DEVICE void load(const Task& task) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) load(task, task.begin / kVector, i);
    }
    DEVICE void load(const Task& task, int from, int i) {
      const int gate = threadIdx.x / 32 % kGates, slice = threadIdx.x / (32 * kGates);
      const int row = task.unit + threadIdx.x % 32 / 4;
      const int depth = (from + (i * kDeep + slice) * 4 + threadIdx.x % 4) * kVector;
      const IO* at = static_cast<const IO*>(task.weight) + gate * task.weight_gate +
                     within(depth, task.end, kVector);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        vector[i][j / 2][j % 2] =
            load_weights(at + int64_t(within(row + 8 * j, task.D, 1)) * task.D);
      }
    }
  };

  static DEVICE void run(const Task& task, Weights& weights) {
    const int lane = threadIdx.x % 32, r = lane / 4, q = lane % 4;
    const int gate = threadIdx.x / 32 % kGates, slice = threadIdx.x / (32 * kGates);
    float sums[2][kTiles][4] = {};
    for (int from = task.begin / kVector; from * kVector < task.end; from += kChunk) {
      if (from * kVector > task.begin) __syncthreads();
      if (task.states) {
        stage_operand<IO, Base::kSequences, kChunk, kPitch, kThreads, true>(task, from);
      } else {
        stage_operand<IO, Base::kSequences, kChunk, kPitch, kThreads, false>(task, from);
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int step = i * kDeep + slice;
        if ((from + step * 4) * kVector >= task.end) break;
        const bool inside = (from + step * 4 + q) * kVector < task.end;
        uint32_t rows[2][2][4];  // operands of the instruction: [tile][half of the vector]
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            rows[m][w / 2][w % 2 * 2] = operand<IO>(inside ? weights.vector[i][m][0].word[w] : 0);
            rows[m][w / 2][w % 2 * 2 + 1] =
                operand<IO>(inside ? weights.vector[i][m][1].word[w] : 0);
          }
        }
        if ((from + kChunk) * kVector < task.end) weights.load(task, from + kChunk, i);
        multiply<IO>(sums, rows, step_shared + r * kPitch + step * 4 + q, kPitch, task.columns);
      }
    }
    __syncthreads();  // partial sums will overwrite the operand
    const auto place = [&](int n, int i) {
      return Base::at(kDeep == 2 ? 0 : slice, gate, n * 8 + 2 * q + i % 2, i / 2 * 8 + r);
    };
    const auto gives = [&](int n) { return kDeep != 2 || n / (kTiles / 2) != slice; };
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (n * 8 >= task.columns) break;
      if (!gives(n)) continue;
#pragma unroll
      for (int i = 0; i < 8; ++i) *place(n, i) = sums[i / 4][n][i % 4];
    }
    if (kDeep != 2) return;
    // Two warps share a gate: each adds its sums of half of the columns to the other's.
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (n * 8 >= task.columns) break;
      if (gives(n)) continue;
#pragma unroll
      for (int i = 0; i < 8; ++i) *place(n, i) += sums[i / 4][n][i % 4];
    }
  }
};

// sum over gates and j of weight[gate, j, unit] dr[gate, j], with the depth in (gate, j) order. The
// weight is contiguous along units, not along the depth. So a lane loads the same vector of units
// from as many rows as an operand vector has elements, and pairs the rows up itself; eight lanes
// read 128 contiguous bytes.
template <int, typename IO, int kTiles>
struct BackwardMatrix : Partials<1, 8 * kTiles, 8 * IoTraits<IO>::kVector, 8> {
  using Base = Partials<1, 8 * kTiles, 8 * IoTraits<IO>::kVector, 8>;
  static constexpr int kDeep = Base::kSlices;  // warps that share the depth
  static constexpr int kResident = 1, kCells = 2;
  using Value = typename IoTraits<IO>::Value;
  static constexpr int kVector = IoTraits<IO>::kVector, kQuantum = 4 * kVector;
  static constexpr int kThreads = 32 * Base::kSlices;
  static constexpr int kSteps = 16 / kVector, kRowTiles = kVector / 2;
  static constexpr int kChunk = kSteps * Base::kSlices * 4, kPitch = kChunk + 4;
  static constexpr int kStageBytes = Base::kSequences * kPitch * sizeof(Vector);
  static constexpr int kSharedBytes =
      kStageBytes > Base::kPartialBytes ? kStageBytes : Base::kPartialBytes;

  struct Weights {
    Vector vector[kSteps][kVector];

    DEVICE void load(const Task& task) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) load(task, task.begin / kVector, i);
    }
    DEVICE void load(const Task& task, int from, int i) {
      const int r = threadIdx.x % 32 / 4, q = threadIdx.x % 4, slice = threadIdx.x / 32;
      const int depth = (from + (i * Base::kSlices + slice) * 4 + q) * kVector;
      const int row = within(depth, task.end, kVector), gate = row / task.D;
      const IO* rows = static_cast<const IO*>(task.weight) + gate * task.weight_gate +
                       int64_t(row - gate * task.D) * task.D +
                       within(task.unit + r * kVector, task.D, kVector);
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        vector[i][e] = load_weights(rows + e * int64_t(task.D));
      }
    }
  };

  static DEVICE void run(const Task& task, Weights& weights) {
    const int lane = threadIdx.x % 32, r = lane / 4, q = lane % 4, slice = threadIdx.x / 32;
    float sums[kRowTiles][kTiles][4] = {};
    for (int from = task.begin / kVector; from * kVector < task.end; from += kChunk) {
      if (from * kVector > task.begin) __syncthreads();
      stage_operand<IO, Base::kSequences, kChunk, kPitch, kThreads, false>(task, from);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int step = i * Base::kSlices + slice;
        if ((from + step * 4) * kVector >= task.end) break;
        uint32_t rows[kRowTiles][2][4];
        transpose(rows, weights.vector[i]);
        if ((from + step * 4 + q) * kVector >= task.end) {
#pragma unroll
          for (int m = 0; m < kRowTiles * 8; ++m) rows[m / 8][m / 4 % 2][m % 4] = 0;
        }
        if ((from + kChunk) * kVector < task.end) weights.load(task, from + kChunk, i);
        multiply<IO>(sums, rows, step_shared + r * kPitch + step * 4 + q, kPitch, task.columns);
      }
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
#pragma unroll
        for (int m = 0; m < kRowTiles; m += 2) {
          float* to = Base::at(slice, 0, n * 8 + 2 * q + column, r * kVector + 2 * m);
          *reinterpret_cast<float4*>(to) =
              make_float4(sums[m][n][column], sums[m][n][2 + column], sums[m + 1][n][column],
                          sums[m + 1][n][2 + column]);
        }
      }
    }
  }

  // Row r of tile m is unit 2 m of the lane's vector, and row r + 8 is unit 2 m + 1.
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
