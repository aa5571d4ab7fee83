// The kernel's sizes, and which tile of which step a thread block is at.
#pragma once
#include "layout.cuh"

namespace flashcell::cuda::batch {

// kSaves is whether the forward pass writes h_prev and the saved values.
template <typename Cell_, typename IO_, int kIndex, bool kSaves_>
struct Shape {
  using Cell = Cell_;
  using IO = IO_;
  using V = typename IoTraits<IO>::Value;
  static constexpr int kIo = sizeof(IO);
  static constexpr int kDepth = depth_of_panel(kIo), kPiece = 16 / kIo;  // elements
  static constexpr int G = Cell::kGates, K = Cell::kStates, R = Cell::kBias, kSaved = Cell::kSaved;
  static constexpr Tile kTile = tiles(G, kIo)[kIndex];
  static constexpr int kBlocks = kTile.blocks, kUnits = kTile.units;
  static constexpr bool kTurns = kTile.turns, kSaves = kSaves_;
  static constexpr int kWarpgroups = kTile.warpgroups();
  static constexpr int kRows = kTile.rows(), kColumns = kUnits * G;
  static constexpr int kGroups = (kUnits + 15) / 16;  // of 16 units; the last one may have 8 or 4
  // The units of a group that a lane has.
  template <int group>
  static constexpr int kOfLane = std::min(kUnits - group * 16, 16) / 4;
  static_assert(kUnits % 8 == 0 || (kUnits % 4 == 0 && G == 4 && kIo == 2));
  static constexpr int kFirst = kReadsH<Cell> ? 0 : 1;  // the first state that a step reads
  static constexpr bool kKeeps = keeps_state(kSizesOf<Cell>);
  static constexpr int kStages = kTile.stages(G, kKeeps);
  static constexpr int kKeptBytes = kTile.kept_bytes(kKeeps);
  static constexpr int kKeptTiles = kTile.kept_tiles(), kStateBytes = kTile.state_bytes();
  static constexpr int kKeptUnits = kTile.kept_units();
  using Sums = float[kBlocks][kColumns / 8][4];
};

template <typename S>
struct Position {
  int t, head, unit0, steps;  // `steps` of the tile's longest sequence
  int own;                    // the tile's index among those of the thread block
  int64_t row0;               // the tile's first sequence
  unsigned* published;        // counts those of the tile's sequences
  const char* weight;

  DEVICE Position(const SequenceParams& p, const Work& work, int t, int tile)
      : t(t), own(tile / int(gridDim.x)) {
    const int unit_tile = tile % work.unit_tiles;
    const int row_tile = tile / work.unit_tiles % work.row_tiles;
    head = int(p.first_head) + tile / work.unit_tiles / work.row_tiles;
    unit0 = unit_tile * S::kUnits, row0 = int64_t(row_tile) * S::kRows;
    published = work.published + head * work.row_tiles + row_tile;
    weight = work.weight + (int64_t(head) * work.unit_tiles + unit_tile) * work.all_panels *
                               S::kColumns * kRowBytes;
    // The longest sequence is the first; the shuffle tells the compiler that it is one for all.
    steps = __shfl_sync(~0u, Column(p, row0).length, 0);
  }
  // The lane's row of the tile, for its warp's first eight rows.
  DEVICE static int own_row() {
    const int thread = threadIdx.x % kWarpgroup;
    return own_blocks() * 64 + thread / 32 * 16 + thread % 32 / 4;
  }
  DEVICE static int own_blocks() {  // the blocks of the tile before the warpgroup's
    return S::kTurns ? 0 : (threadIdx.x / kWarpgroup - 1) * S::kBlocks;
  }
  DEVICE bool runs() const { return t < steps; }
  DEVICE bool has_h(const Work& work) const { return runs() && (t > 0 || work.has_initial); }
  // The panels of the product: first those of the input, then those of h.
  DEVICE int panels(const Work& work) const {
    return (runs() ? work.input_panels : 0) + (has_h(work) ? work.panels : 0);
  }
  // The panels of the tile's sequences that hold h after step t.
  DEVICE char* operand(const Work& work, int t) const {
    return work.operand + (t & 1) * work.operand_bytes + head * work.panels * panel_bytes(work) +
           row0 * kRowBytes;
  }
  // The panels of the tile's sequences that hold the input of step t.
  DEVICE const char* input(const Work& work, int t) const {
    return work.input + int64_t(t) * work.input_panels * panel_bytes(work) + row0 * kRowBytes;
  }
  DEVICE static int64_t panel_bytes(const Work& work) { return work.row_capacity * kRowBytes; }
};

// Calls body(position) for every tile of the block, step after step.
template <typename S, typename Body>
DEVICE void for_positions(const SequenceParams& p, const Work& work, Body body) {
  const int tiles = int(p.heads) * work.row_tiles * work.unit_tiles;
  for (int t = 0; t < p.T; ++t) {
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      body(Position<S>(p, work, t, tile));
    }
  }
}

}  // namespace flashcell::cuda::batch
