// What both directions of the step engine share: which part of a step a thread block computes, and
// how partial sums of a product meet, in one thread block or across a cluster of them.
#pragma once
#include <cooperative_groups.h>

#include "engine.h"
#include "sequence.cuh"

namespace flashcell::cuda {

struct Step {  // what a launch knows besides the parameters
  int t;
  int ranks;      // blocks of a cluster: each takes a part of the depth of the product
  int share;      // that part, in elements
  void* operand;  // forward, T > 1: [2, S, N, D] io
};

// `units` units of a head for `columns` sequences: one cluster. Blocks of a cluster are neighbours.
struct Tile {
  int rank;
  int64_t unit, head, first;  // first sequence

  DEVICE Tile(const SequenceParams& p, int ranks, int units, int columns) {
    const unsigned tiles = (unsigned(p.D) + units - 1) / units, heads = unsigned(p.N);
    unsigned index = blockIdx.x;
    rank = index % ranks, index /= ranks;
    unit = index % tiles * units, index /= tiles;
    head = index % heads, first = int64_t(index / heads) * columns;
  }
};

// The product of a tile, as its warps see it.
struct Task {
  const void* weight;       // of the head, gate 0
  int64_t weight_gate;      // elements from one gate to the next
  int64_t operand_gate;     // backward: the same in a row of the operand
  int D, unit;              // width, first unit
  int begin, end;           // of the depth
  int columns;              // that run; those after them need no product
  const void* const* rows;  // shared: the operand of each column, null for zeros
  bool states;              // the operand is fp32 states, to be rounded to io
};

struct alignas(16) Vector {
  uint32_t word[4];
};

extern __shared__ Vector step_shared[];

template <typename T>
DEVICE Vector load_vector(const T* from) {
  const uint4 v = __ldg(reinterpret_cast<const uint4*>(from));
  return {v.x, v.y, v.z, v.w};
}

// Elements [at, at + kVector) of an operand.
template <typename IO>
DEVICE Vector load_operand(const void* row, int64_t at, bool states) {
  if (sizeof(IO) == 4 || !states) return load_vector(static_cast<const IO*>(row) + at);
  const Vector lo = load_vector(static_cast<const float*>(row) + at);
  const Vector hi = load_vector(static_cast<const float*>(row) + at + 4);
  Vector v;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    v.word[i] =
        Pair<IO>::of(__uint_as_float(lo.word[2 * i]), __uint_as_float(lo.word[2 * i + 1])).word[0];
    v.word[2 + i] =
        Pair<IO>::of(__uint_as_float(hi.word[2 * i]), __uint_as_float(hi.word[2 * i + 1])).word[0];
  }
  return v;
}

// One element, as io rounds it.
template <typename IO>
DEVICE float load_element(const void* row, int64_t at, bool states) {
  if (!states) return to_float(static_cast<const IO*>(row)[at]);
  return to_float(from_float<IO>(static_cast<const float*>(row)[at]));
}

// The same address in another block of the cluster.
DEVICE const float* peer(const float* shared, [[maybe_unused]] int rank) {
#if __CUDA_ARCH__ >= 900
  return cooperative_groups::this_cluster().map_shared_rank(shared, rank);
#else
  return shared;
#endif
}

// Every block of the cluster sees what all wrote to shared memory.
DEVICE void meet(int ranks) {
  if (ranks == 1) return __syncthreads();
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;\n barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// No block leaves while others may read its shared memory. All reads have returned by now, for
// what was stored depends on them, so nothing needs to be released: that would wait for the stores.
DEVICE void leave([[maybe_unused]] int ranks) {
#if __CUDA_ARCH__ >= 900
  if (ranks == 1) return;
  asm volatile("barrier.cluster.arrive.relaxed;\n barrier.cluster.wait;" ::: "memory");
#endif
}

// Partial sums in shared memory, [slice][row][column][unit], rows being the gates (forward) or one.
// Four units of padding let the lanes of an accumulator store to 32 banks.
template <int kRowsOf, int kColumnsOf, int kUnitsOf, int kSlicesOf>
struct Partials {
  static constexpr int kRows = kRowsOf, kSequences = kColumnsOf, kUnits = kUnitsOf;
  static constexpr int kSlices = kSlicesOf, kPitch = kUnits + 4;
  static constexpr int kPartialBytes = kSlices * kRows * kSequences * kPitch * sizeof(float);

  static DEVICE float* at(int slice, int row, int column, int unit) {
    float* partials = reinterpret_cast<float*>(step_shared);
    return partials + ((slice * kRows + row) * kSequences + column) * kPitch + unit;
  }

  // In the order of the depth, whoever asks.
  static DEVICE void sum(float (&total)[kRows], int ranks, int column, int unit) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) total[row] = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const float* from = at(0, 0, column, unit);
      if (ranks > 1) from = peer(from, rank);
#pragma unroll
      for (int i = 0; i < kSlices * kRows; ++i) total[i % kRows] += from[i * kSequences * kPitch];
    }
  }
};

}  // namespace flashcell::cuda
