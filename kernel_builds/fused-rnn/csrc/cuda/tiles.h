// Tiles of the engines. Written by scripts/plan_tiles from tiles/tiles.toml: do not edit.
#pragma once

namespace flashcell::cuda::tiles {

constexpr int kGridUnits = 16;   // of a thread block: the height of the matrix instruction
constexpr int kGridWarps = 8;    // of a thread block; they split the depth of the product
constexpr int kGridTiles = 8;    // of eight sequences that a group alternates between, at most
constexpr int kGridStages = 6;   // of the input ring
constexpr int kGridHeld = 128;   // registers of a lane that keep weight
constexpr int kGridChunks = 36;  // of the depth times row tiles, that the product is unrolled for
constexpr int kGridBlocks = 16;  // of the depth, at most: their words are on their way to a lane

constexpr int kBlockRowBytes = 256;     // of the widest head
constexpr int kBlockStages = 8;         // of the input ring, where ring_bytes hold them
constexpr int kBlockFewStages = 4;      // where they do not, but hold these
constexpr int kBlockLeastStages = 3;    // where they hold neither
constexpr int kBlockRingBytes = 61440;  // of inputs; with operand and outbox what any arch has

}  // namespace flashcell::cuda::tiles
