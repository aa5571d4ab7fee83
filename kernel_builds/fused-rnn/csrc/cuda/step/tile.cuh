// The parts that both directions of the step engine share: which part of a step a thread block
// computes, and how partial sums of a product are added, in one thread block or across a cluster of
// them.
#pragma once
#include <bit>

#include "../engine.h"
#include "../sequence.cuh"
#include "common/cuda/ptx/cluster.cuh"

namespace flashcell::cuda {

struct Step {  // the arguments of a launch besides the parameters of the op
  int t;
  bool follows;   // an earlier launch belongs to the same call
  int rank_bits;  // log2 of the blocks of a cluster, which split the depth of the product
  int share;      // elements of the depth that each block takes
  int N, D, ND;
  int64_t SND;
  void* operand;  // forward, T > 1: [2, S, N, D] io
};

// The tile of one cluster: `kUnits` units of a head for `kSequences` sequences. Blocks of a cluster
// are neighbours in x.
template <typename Product>
struct Tile {
  int rank, unit, head;
  int bits;       // log2 of the units of a rank
  int64_t first;  // the first sequence

  DEVICE explicit Tile(const Step& step) {
    rank = blockIdx.x & ((1 << step.rank_bits) - 1), bits = Product::kUnitBits - step.rank_bits;
    first = int64_t(blockIdx.x >> step.rank_bits) * Product::kSequences;
    unit = blockIdx.y * Product::kUnits, head = blockIdx.z;
  }
  DEVICE int sequences(const SequenceParams& p) const {
    return int(min(p.S - first, int64_t(Product::kSequences)));
  }
};

// What a column does at a step, worked out once for all of its units.
struct Place {
  const void* operand;  // operand of the product, or null for zeros
  int64_t row, x;       // offsets of the step: row of the outputs, and elements of x
  int index;            // row in the state tensors
  unsigned marks;
};

// The places of a tile's columns in shared memory, and how many columns need a product. Those are
// the first ones, because sequences are sorted longest first.
template <int kSequences>
struct Places {
  static constexpr int kWarps = (kSequences + 31) / 32;
  Place place[kSequences];
  int counts[kWarps];

  // Sets the counts; every thread must call it, and a barrier must follow.
  DEVICE void count(bool runs, bool listed) {
    if (threadIdx.x / 32 >= kWarps) return;
    const int running = __popc(__ballot_sync(~0u, runs));
    const bool any = __any_sync(~0u, listed);
    if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = running | (any ? 1 << 16 : 0);
  }
  DEVICE int total() const {  // above bit 16: whether any column needs anything
    int sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += counts[w];
    return sum;
  }
};

// Programmatic dependent launch. Once all blocks of this launch have called start_next, those of
// the next launch start, load data that no launch writes, and wait for this launch to end.
DEVICE void start_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The product of a tile, as its warps receive it.
struct Task {
  const void* weight;    // the head's weight, gate 0
  int64_t weight_gate;   // elements from one gate to the next
  int64_t operand_gate;  // backward: elements from one gate to the next in a row of the operand
  int D, unit;           // head width, and first unit
  int begin, end;        // range of the depth
  int columns;           // number of columns that need a product: the first ones
  const Place* places;   // in shared memory, one for each column
  bool states;           // the operand is the fp32 states, to be rounded to io
};

struct alignas(16) Vector {
  uint32_t word[4];
};

extern __shared__ Vector step_shared[];

// Each load returns zeros if it is not wanted. Each is a single instruction: the compiler would
// move the use of a conditional load into the condition, and so wait for every load before starting
// the next. Only weights are constant while launches overlap, so only they use the read-only path.
#define FLASHCELL_LOAD_VECTOR(path, wanted, from)                              \
  Vector v;                                                                    \
  asm volatile(                                                                \
      "{.reg .pred p;\n setp.ne.b32 p, %5, 0;\n"                               \
      " mov.b32 %0, 0;\n mov.b32 %1, 0;\n mov.b32 %2, 0;\n mov.b32 %3, 0;\n"   \
      " @p ld.global" path ".v4.b32 {%0, %1, %2, %3}, [%4];}"                  \
      : "=&r"(v.word[0]), "=&r"(v.word[1]), "=&r"(v.word[2]), "=&r"(v.word[3]) \
      : "l"(from), "r"(int(wanted)));                                          \
  return v
DEVICE Vector load_weights(bool wanted, const void* from) {
  FLASHCELL_LOAD_VECTOR(".nc", wanted, from);
}
DEVICE Vector load_vector(bool wanted, const void* from) {
  FLASHCELL_LOAD_VECTOR("", wanted, from);
}
#undef FLASHCELL_LOAD_VECTOR
DEVICE Vector load_weights(const void* from) {
  const uint4 v = __ldg(static_cast<const uint4*>(from));
  return {v.x, v.y, v.z, v.w};
}
DEVICE float load_float(bool wanted, const float* from) {
  float v;
  asm volatile(
      "{.reg .pred p;\n setp.ne.b32 p, %2, 0;\n mov.b32 %0, 0;\n @p ld.global.b32 %0, [%1];}"
      : "=&f"(v)
      : "l"(from), "r"(int(wanted)));
  return v;
}

template <typename IO>
DEVICE IO load_io(bool wanted, const IO* from) {
  if constexpr (sizeof(IO) == 4) {
    return load_float(wanted, from);
  } else {
    uint16_t v;
    asm volatile(
        "{.reg .pred p;\n setp.ne.b32 p, %2, 0;\n mov.b16 %0, 0;\n @p ld.global.b16 %0, [%1];}"
        : "=&h"(v)
        : "l"(from), "r"(int(wanted)));
    return reinterpret_cast<const IO&>(v);
  }
}

// Rounds as many states as fill a vector of io.
template <typename IO>
DEVICE Vector round_states(const Vector (&states)[IoTraits<IO>::kVector / 4]) {
  Vector v = states[0];
  if constexpr (sizeof(IO) == 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t* pair = states[i / 2].word + i % 2 * 2;
      v.word[i] = Pair<IO>::of(__uint_as_float(pair[0]), __uint_as_float(pair[1])).word[0];
    }
  }
  return v;
}

// Loads one element as io rounds it.
template <typename IO>
DEVICE float load_element(const void* row, int64_t at, bool states) {
  if (!states) return to_float(static_cast<const IO*>(row)[at]);
  return to_float(from_float<IO>(static_cast<const float*>(row)[at]));
}

// Loads four floats from the same shared address in another block of the cluster.
DEVICE float4 load_peer(const float* shared, int rank) {
  return load_cluster(cluster_address(shared_address(shared), rank));
}

// Makes the shared memory writes of every block of the cluster visible to all of them.
DEVICE void meet(int ranks) {
  if (ranks == 1) return __syncthreads();
  cluster_arrive_diverged();
  cluster_wait_diverged();
}

// done_with_peers and leave keep a block from exiting while others may read its shared memory.
// Loads that have been used have completed, so the arrival need not be a release, which would wait
// for stores.
DEVICE void done_with_peers(int ranks) {
  if (ranks > 1) cluster_arrive_relaxed_diverged();
}
DEVICE void leave(int ranks) {
  if (ranks > 1) cluster_wait_diverged();
}

// Partial sums in shared memory: [slice][row][four units][column][unit of four], where a row is a
// gate (forward) or there is one (backward). What one rank reads of another is then contiguous,
// which keeps transfers between SMs fast. Four floats of padding let an accumulator's lanes store
// to 32 banks.
template <int kRowsOf, int kColumnsOf, int kUnitsOf, int kSlicesOf>
struct Partials {
  static constexpr int kRows = kRowsOf, kSequences = kColumnsOf, kUnits = kUnitsOf;
  static constexpr int kSlices = kSlicesOf, kQuadPitch = 4 * kSequences + 4;
  static constexpr int kRowPitch = kUnits / 4 * kQuadPitch, kSlicePitch = kRows * kRowPitch;
  static constexpr int kUnitBits = std::countr_zero(unsigned(kUnits));
  static_assert(kUnits == 1 << kUnitBits);
  static constexpr int kPartials = kSlices * kSlicePitch;
  // The totals of a rank's own units follow in the same layout; they take at most half the size.
  static constexpr int kPartialBytes = (kPartials + kSlicePitch / 2) * sizeof(float);

  static DEVICE float* at(int slice, int row, int column, int unit) {
    float* partials = reinterpret_cast<float*>(step_shared);
    return partials + slice * kSlicePitch + row * kRowPitch + offset(column, unit);
  }
  static DEVICE float* total_at(int row, int column, int unit, int bits) {
    float* totals = reinterpret_cast<float*>(step_shared) + kPartials;
    return totals + (row << (bits - 2)) * kQuadPitch + offset(column, unit);
  }
  static DEVICE int offset(int column, int unit) {
    return unit / 4 * kQuadPitch + column * 4 + unit % 4;
  }

  // Adds up the partial sums that all blocks of the cluster have of the 2^bits units from `unit`
  // on. A thread starts the loads of two places, four parts each, before it waits for the first.
  static DEVICE void gather(int ranks, int columns, int unit, int bits) {
    constexpr int kPlaces = 2, kParts = 4;
    const int quads = bits - 2, count = kRows * kSequences << quads, parts = ranks * kSlices;
#pragma unroll 1
    for (int start = threadIdx.x; start < count; start += kPlaces * blockDim.x) {
      float4 sums[kPlaces] = {};
      int row[kPlaces], quad[kPlaces], column[kPlaces];
      bool inside[kPlaces];
#pragma unroll
      for (int j = 0; j < kPlaces; ++j) {
        const int i = start + j * int(blockDim.x), of = min(i, count - 1) / kSequences;
        row[j] = of >> quads, quad[j] = of & ((1 << quads) - 1);
        inside[j] = i < count && i % kSequences < columns;
        column[j] = inside[j] ? i % kSequences : 0;
      }
#pragma unroll 1
      for (int first = 0; first < parts; first += kParts) {
        float4 values[kPlaces][kParts];
#pragma unroll
        for (int j = 0; j < kPlaces; ++j) {
          const float* from = at(0, row[j], column[j], unit + quad[j] * 4);
#pragma unroll
          for (int k = 0; k < kParts; ++k) {
            const int part = min(first + k, parts - 1);
            values[j][k] = load_peer(from + part % kSlices * kSlicePitch, part / kSlices);
          }
        }
#pragma unroll
        for (int j = 0; j < kPlaces; ++j) {
#pragma unroll
          for (int k = 0; k < kParts; ++k) {
            if (first + k >= parts) break;
            sums[j].x += values[j][k].x, sums[j].y += values[j][k].y;
            sums[j].z += values[j][k].z, sums[j].w += values[j][k].w;
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kPlaces; ++j) {
        if (!inside[j]) continue;
        *reinterpret_cast<float4*>(total_at(row[j], column[j], quad[j] * 4, bits)) = sums[j];
      }
    }
    __syncthreads();
    done_with_peers(ranks);
  }

  // Adds up one total in the order of the depth, whichever thread asks. `of` counts from the first
  // unit of the rank.
  static DEVICE void sum(float (&total)[kRows], int ranks, int column, int of, int bits) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      total[row] = ranks > 1 ? *total_at(row, column, of, bits) : 0;
    }
    if (ranks > 1) return;
#pragma unroll
    for (int i = 0; i < kSlices * kRows; ++i) {
      total[i % kRows] += *at(i / kRows, i % kRows, column, of);
    }
  }
};

}  // namespace flashcell::cuda
