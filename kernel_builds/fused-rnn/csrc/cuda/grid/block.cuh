// A thread block of the grid engine: what its warps share and how they hand work over.
#pragma once
#include "common/cuda/ptx/cluster.cuh"
#include "common/cuda/ptx/mbarrier.cuh"
#include "common/cuda/ptx/named_barrier.cuh"
#include "pass.cuh"

namespace flashcell::cuda::grid {

// The cell has a thread for each unit and each of 8 columns: [column][unit]; of 16 units columns 0,
// 4, 1, 5, .. so that a warp finds its sums in all banks.
DEVICE constexpr int column_of(int units, int place) {
  return units == 16 ? place / 32 + place / 16 % 2 * 4 : place / units;
}
DEVICE constexpr int place_of(int units, int column, int unit) {
  return (units == 16 ? column % 4 * 2 + column / 4 : column) * units + unit;
}

struct Range {  // of a launch
  int first_head;
  int groups, members;  // groups of a head, thread blocks of a group
  int depth_blocks;     // of the product
  unsigned panel;       // elements of the medium from a gate to the next: N D
  int64_t initial;  // elements from the medium to [S, N, D] io: the first operand, which counts as
                    // polled
  unsigned pause;   // clocks between a block's part of a lone tile and asking for all parts
};

struct Walk {  // through the steps; within a step through the tiles of the round
  int t, tile;
};
struct Route {
  int tiles, begin, end;  // steps from begin to before end
  bool even;              // every tile has the same number of them
};

template <int kFloats>
struct alignas(4 * kFloats) Slot {
  float sum[kFloats];
  friend DEVICE Slot operator+(const Slot& a, const Slot& b) {
    Slot c;
#pragma unroll
    for (int i = 0; i < kFloats; ++i) c.sum[i] = a.sum[i] + b.sum[i];
    return c;
  }
};

template <typename Pass>
struct alignas(16) Shared {  // and behind it the weight that is not in registers
  using IO = typename Pass::IO;
  static constexpr Shape kShape = Pass::kShape;
  static constexpr int kColumnSlots = column_slots(kShape), kColumns = tile_columns(kShape);
  static constexpr int kUnits = kShape.units, kCellWarps = cell_threads(kShape) / 32;
  static constexpr int kTiles = tiles_at_once(kShape), kPlane = Pass::kPlane;
  using Sums = Slot<slot_floats(kShape)>;

  Sums partials[2][kWarps][kColumns * kColumnSlots];
  IO inputs[kStages][kShape.inputs][kColumns][kUnits];
  float carried[kTiles][kShape.states + kShape.sums][kPlane];
  Column columns[kTiles][kColumns];
  int lengths[kTiles];
  int published[kTiles][kCellWarps];  // the step that a warp of the cell has done last
  uint64_t emptied[2];  // of the partial sums: a barrier of the cell warps for the product warps
  static constexpr int kFetched = fetch_threads(kShape) > 0 ? kStages : 0;
  uint64_t fetched[kFetched], released[kFetched];  // of the ring
  uint64_t received[2][2];  // [half of the cell warps][buffer]: barriers of the cluster's blocks
  float inbox[2][2][kShape.split > 1 ? kShape.split : 0][kPlane];
};

// Named barriers. The product warps arrive at kFilled + i when the partial sums i are complete, the
// cell warps wait for them there.
constexpr int kFilled = 1, kCellsOnly = 3, kRound = 4;

// After what the values come from, and before what is made of them.
DEVICE void mbarrier_arrive(uint64_t& barrier, bool arrives, float& a, float& b) {
  asm volatile(
      "{\n .reg .pred p;\n .reg .b64 state;\n setp.ne.b32 p, %3, 0;\n"
      " @p mbarrier.arrive.shared.b64 state, [%2];\n}"
      : "+f"(a), "+f"(b)
      : "r"(shared_address(&barrier)), "r"(int(arrives))
      : "memory");
}

// At addresses in shared memory, which no pointer need be made for.
DEVICE uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
template <int kFloats>
DEVICE void store_shared(uint32_t address, const Slot<kFloats>& slot) {
  const float (&v)[kFloats] = slot.sum;
  static_assert(kFloats == 1 || kFloats == 2 || kFloats == 4);
  if constexpr (kFloats == 1) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v[0]) : "memory");
  } else if constexpr (kFloats == 2) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(v[0]), "f"(v[1])
                 : "memory");
  } else {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v[0]), "f"(v[1]),
                 "f"(v[2]), "f"(v[3])
                 : "memory");
  }
}

// What both kinds of warps know: which part of which head the block works on, and when.
template <typename Pass>
struct Block {
  using Params = typename Pass::Params;
  using IO = typename Pass::IO;
  static constexpr int kColumns = tile_columns(Pass::kShape), kTiles = tiles_at_once(Pass::kShape);
  static constexpr int kUnits = Pass::kShape.units, kCells = cell_threads(Pass::kShape);

  const Params& p;
  const Range& range;
  Shared<Pass>& shared;
  const int D, head, first_unit;

  DEVICE Block(const Params& params, const Range& r, unsigned char* memory)
      : p(params),
        range(r),
        shared(*reinterpret_cast<Shared<Pass>*>(memory)),
        D(int(p.D)),
        head(r.first_head + blockIdx.x / (r.members * r.groups)),
        first_unit(blockIdx.x % r.members * kUnits) {}

  // A cluster of kSplit blocks splits the panels of the product of all its units.
  DEVICE int rank() const { return int(blockIdx.x) % Pass::kSplit; }
  DEVICE int cluster_unit() const { return first_unit - rank() * kUnits; }
  DEVICE int first_panel() const { return rank() * Pass::kPanels; }

  DEVICE static int lane() { return int(threadIdx.x % 32); }

  // Every sequence has all T steps, behind those of the one before: where a step lies and whether
  // it runs is arithmetic, and nothing of a column need be read.
  DEVICE bool whole() const { return p.sequences == nullptr; }

  // round(first tile, tiles): a group takes every range.groups-th tile, some of them a round.
  template <typename Round>
  DEVICE void rounds(const Round& round) const {
    const int groups = range.groups, group = blockIdx.x / range.members % groups;
    const int count = (int((p.S + kColumns - 1) / kColumns) - group + groups - 1) / groups;
    const int rounds = (count + kTiles - 1) / kTiles;
    for (int i = 0, begin = 0; i < rounds; ++i) {
      const int tiles = (count - begin) / (rounds - i);
      round(group + begin * groups, tiles);
      begin += tiles;
    }
  }

  // The steps of a round.
  DEVICE Route route(int tiles) const {
    int longest = 0;
    bool even = true;
    for (int tile = 0; tile < tiles; ++tile) longest = max(longest, shared.lengths[tile]);
    for (int tile = 0; tile < tiles; ++tile) even &= longest == shared.lengths[tile];
    return {tiles, Pass::kDescends ? longest - 1 : 0, Pass::kDescends ? -2 : longest, even};
  }
  // Through every kEvery-th tile from `lowest` on, not beyond the end: few instructions, they are
  // in every step.
  template <int kEvery = 1>
  DEVICE Walk first(const Route& route, int lowest = 0) const {
    const int begin = lowest < route.tiles ? route.begin : route.end;
    return route.begin == route.end || begin == route.end
               ? Walk{route.end, 0}
               : following<kEvery>({begin, lowest - kEvery}, route, lowest);
  }
  template <int kEvery = 1>
  DEVICE Walk following(Walk walk, const Route& route, int lowest = 0) const {
    do {
      walk.tile += kEvery;
      if (walk.tile >= route.tiles) walk.tile = lowest, walk.t += Pass::kDescends ? -1 : 1;
    } while (!route.even && walk.t != route.end && walk.t >= shared.lengths[walk.tile]);
    return walk;
  }
};

}  // namespace flashcell::cuda::grid
