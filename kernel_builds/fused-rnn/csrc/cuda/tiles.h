// Tiles of the engines. Written by scripts/plan_tiles from tiles/tiles.toml: do not edit.
#pragma once

namespace flashcell::cuda::tiles {

constexpr int kGridUnits = 16;   // units of a thread block: the height of the matrix instruction
constexpr int kGridWarps = 8;    // product warps of a thread block; they split the depth
constexpr int kGridTiles = 8;    // most tiles of eight sequences that a group alternates between
constexpr int kGridStages = 6;   // stages of the input ring
constexpr int kGridHeld = 128;   // registers of a lane that hold weights
constexpr int kGridChunks = 36;  // largest product of depth chunks and row tiles that is unrolled
constexpr int kGridBlocks = 16;  // most blocks of the depth: their words are in flight to a lane

constexpr int kBlockRowBytes = 256;     // bytes of a row of the widest head
constexpr int kBlockStages = 8;         // stages of the input ring, if they fit in ring_bytes
constexpr int kBlockFewStages = 4;      // stages if those do not fit, but these do
constexpr int kBlockLeastStages = 3;    // stages if neither fit
constexpr int kBlockRingBytes = 61440;  // leaves room for operand and outputs on every GPU

}  // namespace flashcell::cuda::tiles
