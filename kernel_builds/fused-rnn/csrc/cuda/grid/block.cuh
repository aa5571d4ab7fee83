// A thread block of the grid engine: the shared memory of its warps and how they synchronise.
#pragma once
#include "common/cuda/ptx/cluster.cuh"
#include "common/cuda/ptx/mbarrier.cuh"
#include "common/cuda/ptx/named_barrier.cuh"
#include "pass.cuh"

namespace flashcell::cuda::grid {

// The cell has one thread for each unit and each of 8 columns, in the order [column][unit]. With 16
// units the columns come as 0, 4, 1, 5, ..., so that a warp's reads of sums use all banks.
DEVICE constexpr int column_of(int units, int place) {
  return units == 16 ? place / 32 + place / 16 % 2 * 4 : place / units;
}
DEVICE constexpr int place_of(int units, int column, int unit) {
  return (units == 16 ? column % 4 * 2 + column / 4 : column) * units + unit;
}

struct Range {  // the part of the work that one launch does
  int first_head;
  int groups, members;  // groups per head, and thread blocks per group
  int depth_blocks;     // blocks of the product's depth
  unsigned panel;       // elements from one gate to the next in the exchange tensor: N D
  // Elements from the exchange tensor to the rounded initial states, [S, N, D] io, from which the
  // first operand is read.
  int64_t initial;
  unsigned pause;  // clocks to wait after publishing before polling, if there is a single tile
};

struct Walk {  // a position in the loop over steps and, within a step, over the tiles of the round
  int t, tile;
};
struct Route {
  int tiles, begin, end;  // the loop runs from step `begin` up to, not including, `end`
  bool even;              // every tile has the same number of steps
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
struct alignas(16) Shared {  // followed in memory by the weights that do not fit in registers
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
  int published[kTiles][kCellWarps];  // the last step that each cell warp has completed
  uint64_t emptied[2];  // cell warps tell the product warps that partial sums have been read
  static constexpr int kFetched = fetch_threads(kShape) > 0 ? kStages : 0;
  // For stages of the input ring: filled by Fetch, and read by the cells.
  uint64_t fetched[kFetched], released[kFetched];
  // [half of the cell warps][buffer]: counts what other blocks of the cluster send.
  uint64_t received[2][2];
  float inbox[2][2][kShape.split > 1 ? kShape.split : 0][kPlane];
};

// Named barriers. Product warps arrive at kFilled + i when the partial sums of buffer i are
// complete, and cell warps wait there.
constexpr int kFilled = 1, kCellsOnly = 3, kRound = 4;

// Arrives. The operands `a` and `b` keep the arrival after the loads that produce them and before
// the arithmetic that uses them.
DEVICE void mbarrier_arrive(uint64_t& barrier, bool arrives, float& a, float& b) {
  asm volatile(
      "{\n .reg .pred p;\n .reg .b64 state;\n setp.ne.b32 p, %3, 0;\n"
      " @p mbarrier.arrive.shared.b64 state, [%2];\n}"
      : "+f"(a), "+f"(b)
      : "r"(shared_address(&barrier)), "r"(int(arrives))
      : "memory");
}

// Loads and stores by 32-bit shared address, which saves making a pointer.
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

// The part of the work that a thread block has, as both kinds of warps know it: which units of
// which head, and which tiles.
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

  // The kSplit blocks of a cluster split the depth of the product of all the cluster's units.
  DEVICE int rank() const { return int(blockIdx.x) % Pass::kSplit; }
  DEVICE int cluster_unit() const { return first_unit - rank() * kUnits; }
  DEVICE int first_panel() const { return rank() * Pass::kPanels; }

  DEVICE static int lane() { return int(threadIdx.x % 32); }

  // Whether every sequence has all T steps, stored one sequence after the other: a step's row then
  // follows by arithmetic, and no column has to be read.
  DEVICE bool whole() const { return p.sequences == nullptr; }

  // Calls round(first tile, tiles) for each round. A group takes every range.groups-th tile, a few
  // of them per round.
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

  // Returns the loop over the steps of a round.
  DEVICE Route route(int tiles) const {
    int longest = 0;
    bool even = true;
    for (int tile = 0; tile < tiles; ++tile) longest = max(longest, shared.lengths[tile]);
    for (int tile = 0; tile < tiles; ++tile) even &= longest == shared.lengths[tile];
    if constexpr (Pass::kDescends) return {tiles, longest - 1, p.skips_initial ? -1 : -2, even};
    return {tiles, 0, longest, even};
  }
  // first() and following() visit every kEvery-th tile from `lowest` on, and skip tiles whose
  // sequences have ended. They run in every step, so they use few instructions.
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
