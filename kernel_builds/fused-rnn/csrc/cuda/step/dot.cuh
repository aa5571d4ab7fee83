// The products of a step without tensor cores: for exact fp32, for widths that are not whole
// vectors, and for so few sequences that tensor cores would be idle.
#pragma once
#include "../lanes.cuh"
#include "tile.cuh"

namespace flashcell::cuda {

// With exact fp32, the cell is computed in exact fp32 too.
template <typename IO>
using DotValue = std::conditional_t<sizeof(IO) == 4, float, typename IoTraits<IO>::Value>;

// The part of a row that a lane loads at once: a vector, or one element if rows are not aligned.
template <typename IO, bool kVectors>
struct Piece {
  static constexpr int kCount = kVectors ? IoTraits<IO>::kVector : 1;
  static constexpr int kFloats = kVectors ? 4 : 1, kParts = kCount / kFloats;
  Vector vector = {};

  // Loads a vector, or zeros if it is not wanted.
  DEVICE void load(bool wanted, const IO* from) {
    if constexpr (kVectors) {
      vector = load_weights(wanted, from);
    } else {
      vector.word[0] = wanted ? __float_as_uint(to_float(*from)) : 0;
    }
  }
  DEVICE void load(bool wanted, const void* row, int64_t at, bool states) {
    if constexpr (!kVectors) {
      vector.word[0] = wanted ? __float_as_uint(load_element<IO>(row, at, states)) : 0;
    } else if (sizeof(IO) == 4 || !states) {
      vector = load_vector(wanted, static_cast<const IO*>(row) + at);
    } else {
      Vector halves[kCount / 4];
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        halves[i] = load_vector(wanted, static_cast<const float*>(row) + at + 4 * i);
      }
      vector = round_states<IO>(halves);
    }
  }
  // Converts the elements [kFloats part, kFloats (part + 1)).
  DEVICE void floats(int part, float (&to)[kFloats]) const {
    if constexpr (sizeof(IO) == 4 || !kVectors) {
#pragma unroll
      for (int i = 0; i < kFloats; ++i) to[i] = __uint_as_float(vector.word[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 pair = Pair<IO>{vector.word[2 * part + i]}.floats();
        to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
      }
    }
  }
};

// r[gate, unit] = weight[gate, unit, :] h. A warp multiplies the rows of one unit, one for every
// gate, with its lanes side by side along the row.
template <int kGates, typename IO, int kWidth, bool kVectors>
struct ForwardDot : Partials<kGates, kWidth, kWidth == 1 ? 4 : 8, 1> {
  using Base = Partials<kGates, kWidth, kWidth == 1 ? 4 : 8, 1>;
  using Value = DotValue<IO>;
  using Row = Piece<IO, kVectors>;
  static constexpr int kDeep = 1;  // warps that share the depth
  static constexpr int kResident = kWidth == 1 && sizeof(IO) == 2 ? 4 : 1, kCells = 1;
  static constexpr int kThreads = 32 * Base::kUnits;
  // Pieces of a row that a lane, and a warp, loads at once.
  static constexpr int kLoads = 4, kSlots = 32 * kLoads;
  static constexpr int kCount = Row::kCount, kChunk = kSlots * kCount;
  static constexpr int kQuantum = 1;
  // Lanes read up to four floats of the operand at once, side by side: [column][part][slot].
  static constexpr int kFloats = Row::kFloats, kParts = Row::kParts;
  struct alignas(4 * kFloats) Floats {
    float v[kFloats];
  };
  static constexpr int kStageBytes = kWidth * kChunk * sizeof(float);
  static constexpr int kSharedBytes =
      kStageBytes > Base::kPartialBytes ? kStageBytes : Base::kPartialBytes;
  static constexpr int kGateSlots = kGates == 3 ? 4 : kGates;  // a power of two

  struct Weights {  // the weights of one chunk
    Row rows[kLoads][kGates];

    DEVICE void load(const Task& task) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) load(task, 0, i);
    }
    DEVICE void load(const Task& task, int from, int i) {
      const int unit = task.unit + threadIdx.x / 32;
      const int depth = from + (i * 32 + threadIdx.x % 32) * kCount;
      const IO* at = static_cast<const IO*>(task.weight) + int64_t(unit) * task.D + depth;
#pragma unroll
      for (int g = 0; g < kGates; ++g) {
        rows[i][g].load(unit < task.D && depth < task.end, at + g * task.weight_gate);
      }
    }
  };

  static DEVICE void run(const Task& task, Weights& weights) {
    const int lane = threadIdx.x % 32, unit = threadIdx.x / 32;
    float sums[kWidth * kGateSlots] = {};
    for (int from = 0; from < task.end; from += kChunk) {
      // A single column is not staged in shared memory: each lane needs only its own part.
      Row own[kLoads];
      if constexpr (kWidth == 1) {
        const void* row = task.places[0].operand;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const int depth = from + (i * 32 + lane) * kCount;
          own[i].load(row != nullptr && depth < task.end, row, depth, task.states);
        }
      } else {
        if (from > 0) __syncthreads();
        stage(task, from);
        __syncthreads();
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (from + i * 32 * kCount >= task.end) break;
        if constexpr (kWidth == 1) {
          multiply(sums, own[i], weights.rows[i]);
        } else {
          multiply(sums, task.columns, weights.rows[i], i * 32 + lane);
        }
        if (from + kChunk < task.end) weights.load(task, from + kChunk, i);
      }
    }
    const float sum = sum_over_lanes<kWidth * kGateSlots>(sums);
    if (kWidth > 1) __syncthreads();  // the sums overwrite the operand
    const int gate = lane % kGateSlots, column = lane / kGateSlots;
    if (gate < kGates && column < kWidth) *Base::at(0, gate, column, unit) = sum;
  }

  static DEVICE void multiply(float (&sums)[kWidth * kGateSlots], const Row& h,
                              const Row (&rows)[kGates]) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float values[kFloats], weights[kFloats];
      h.floats(part, values);
#pragma unroll
      for (int g = 0; g < kGates; ++g) {
        rows[g].floats(part, weights);
#pragma unroll
        for (int v = 0; v < kFloats; ++v) sums[g] += weights[v] * values[v];
      }
    }
  }

  static DEVICE void stage(const Task& task, int from) {
    Floats* staged = reinterpret_cast<Floats*>(step_shared);
#pragma unroll 4
    for (int i = threadIdx.x; i < task.columns * kSlots; i += kThreads) {
      const int column = i / kSlots, slot = i % kSlots, depth = from + slot * kCount;
      const void* row = task.places[column].operand;
      Row piece;
      piece.load(row != nullptr && depth < task.end, row, depth, task.states);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        Floats floats;
        piece.floats(part, floats.v);
        staged[(column * kParts + part) * kSlots + slot] = floats;
      }
    }
  }

  static DEVICE void multiply(float (&sums)[kWidth * kGateSlots], int columns,
                              const Row (&rows)[kGates], int slot) {
    const Floats* staged = reinterpret_cast<const Floats*>(step_shared);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float weights[kGates][kFloats];
#pragma unroll
      for (int g = 0; g < kGates; ++g) rows[g].floats(part, weights[g]);
#pragma unroll
      for (int column = 0; column < kWidth; ++column) {
        if (column < columns) {
          const Floats h = staged[(column * kParts + part) * kSlots + slot];
#pragma unroll
          for (int v = 0; v < kFloats; ++v) {
#pragma unroll
            for (int g = 0; g < kGates; ++g) {
              sums[column * kGateSlots + g] += weights[g][v] * h.v[v];
            }
          }
        }
      }
    }
  }
};

// sum over gates and j of weight[gate, j, unit] dr[gate, j], with the depth in (gate, j) order.
// Each lane has one unit, and the warps take turns along the depth.
template <int, typename IO, int kWidth>
struct BackwardDot : Partials<1, kWidth, 32, 16> {
  using Base = Partials<1, kWidth, 32, 16>;
  using Value = DotValue<IO>;
  static constexpr int kDeep = Base::kSlices;  // warps that share the depth
  static constexpr int kResident = 1, kCells = 1;
  static constexpr int kThreads = 32 * Base::kSlices;
  static constexpr int kLoads = 8, kChunk = kLoads * Base::kSlices, kQuantum = Base::kSlices;
  static constexpr int kSharedBytes = Base::kPartialBytes;
  static_assert(kChunk * kWidth * sizeof(float) <= Base::kPartialBytes);

  struct Weights {
    DEVICE void load(const Task&) {}
  };

  static DEVICE void run(const Task& task, const Weights&) {
    const int lane = threadIdx.x % 32, slice = threadIdx.x / 32;
    const IO* weight = static_cast<const IO*>(task.weight) + task.unit + lane;
    const bool inside = task.unit + lane < task.D;
    const float4* staged = reinterpret_cast<const float4*>(step_shared);
    float sums[kWidth] = {};
    int gate = (task.begin + slice) / task.D, j = (task.begin + slice) % task.D;
    for (int from = task.begin; from < task.end; from += kChunk) {
      float rows[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const bool wanted = inside && from + i * Base::kSlices + slice < task.end;
        rows[i] = wanted ? to_float(weight[gate * task.weight_gate + int64_t(j) * task.D]) : 0.0f;
        for (j += Base::kSlices; j >= task.D; j -= task.D) ++gate;
      }
      if (from > task.begin) __syncthreads();
      stage(task, from);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
#pragma unroll
        for (int c = 0; c < kWidth; c += 4) {
          if (c < task.columns) {
            const float4 dr = staged[((i * Base::kSlices + slice) * kWidth + c) / 4];
            sums[c] += rows[i] * dr.x, sums[c + 1] += rows[i] * dr.y;
            sums[c + 2] += rows[i] * dr.z, sums[c + 3] += rows[i] * dr.w;
          }
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kWidth; ++c) *Base::at(slice, 0, c, lane) = sums[c];
  }

  // Stages elements [from, from + kChunk) of every column as [element][column], with zeros past the
  // end.
  static DEVICE void stage(const Task& task, int from) {
    float* staged = reinterpret_cast<float*>(step_shared);
    for (int i = threadIdx.x; i < kWidth * kChunk; i += kThreads) {
      const int column = i / kChunk, depth = from + i % kChunk;
      const void* row = task.places[column].operand;
      float value = 0;
      if (row != nullptr && depth < task.end) {
        const int gate = depth / task.D;
        value = load_element<IO>(row, gate * task.operand_gate + (depth - gate * task.D), false);
      }
      staged[i % kChunk * kWidth + column] = value;
    }
  }
};

}  // namespace flashcell::cuda
