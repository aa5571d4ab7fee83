// A thread block of the whole-chip engine: what its warps share and how they hand work over.
#pragma once
#include "barriers.cuh"
#include "chip_pass.cuh"

namespace flashcell::cuda::chip {

struct Range {  // of a launch
  int first_head;
  int groups, members;  // groups of a head, thread blocks of a group
  int depth_blocks;     // of the product
  unsigned panel;       // elements of the medium from a gate to the next: N D
};

struct Walk {  // through the steps; within a step through the tiles of the round
  int t, tile;
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
  static constexpr int kColumnSlots = column_slots(kShape.row_tiles);
  using Sums = Slot<slot_floats(kShape.row_tiles)>;

  Sums partials[2][kWarps][kColumns * kColumnSlots];
  IO inputs[kStages][kShape.inputs][kColumns][kUnits];
  float carried[kTiles][kShape.states + kShape.sums][kPlane];
  Column columns[kTiles][kColumns];
  int lengths[kTiles];
  int published[kTiles][kCellWarps];  // the step that a warp of the cell has done last
  uint64_t emptied[2];  // of the partial sums: a barrier of the cell warps for the product warps
  uint64_t received[2]
                   [2];  // [half of the cell warps][buffer]: barriers of the blocks of the cluster
  float inbox[2][2][kShape.split > 1 ? kShape.split : 0][kPlane];
};

// Named barriers. The product warps arrive at kFilled + i when the partial sums i are complete, the
// cell warps wait for them there.
constexpr int kFilled = 1, kCellsOnly = 3, kRound = 4;

// What both kinds of warps know: which part of which head the block works on, and when.
template <typename Pass>
struct Block {
  using Params = typename Pass::Params;
  using IO = typename Pass::IO;

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

  // round(first tile, tiles): a group takes every range.groups-th tile, at most kTiles a round.
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

  DEVICE int longest(int tiles) const {
    int length = 0;
    for (int tile = 0; tile < tiles; ++tile) length = max(length, shared.lengths[tile]);
    return length;
  }
  DEVICE Walk start(int tiles) const {
    return following({Pass::kDescends ? longest(tiles) - 1 : 0, -1}, tiles, end(tiles));
  }
  DEVICE int end(int tiles) const { return Pass::kDescends ? -2 : longest(tiles); }
  DEVICE Walk following(Walk walk, int tiles, int end) const {
    while (walk.t != end) {
      if (++walk.tile == tiles) walk.tile = 0, walk.t += Pass::kDescends ? -1 : 1;
      if (walk.t == end || walk.t < shared.lengths[walk.tile]) break;
    }
    return walk;
  }
};

}  // namespace flashcell::cuda::chip
