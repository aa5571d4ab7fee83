// What the gates pre-pass (prepass.cu) leaves for the products: everything that depends on the
// gates alone. Rows are those of x: b T + t. A chunk of L steps (a multiple of 64) has tiles of 64
// rows; chunks start where their sequence starts.
//
// With b the sum of the log forget gates, m the scale, and I the tile of row t, the weight of step
// j in row t's sum is, before K^-1/2 q k,
//   2^(u_t + w_j)                                     in one tile, start_t <= j <= t
//   past_t (decays of the tiles in between) future_j  in an earlier tile of the chunk
//   inflow_t = past_t (decays of the earlier tiles)   for the state before the chunk
// and outflow_j = future_j (decays of the later tiles) is what j adds to the state after the chunk,
// which keeps `keep` of the one before. All factors but 2^(u + w) are e^(what is not positive): no
// difference of large numbers. u and w are kept as a whole number and a rest, so that their sum is
// exact however large both are. No factor sees what a reset ended: past is 0 from the reset on,
// future before the last one. A held row has weights 0.
#pragma once
#include "../../params.h"
#include "../launch.h"
#include "common/cuda/device.cuh"

namespace flashcell::cuda {

constexpr int kTile = 64;                          // rows
constexpr int kLongestChunk = 256;                 // longer ones only add products
constexpr int kMostTiles = kLongestChunk / kTile;  // of a chunk

struct Chunk {
  int64_t row;   // of x: b T + t of the first step
  int steps;     // that run
  int rows;      // steps, and padding after them
  int sequence;  // row of the state tensors
  int number;    // in the sequence
};

// Which chunks there are. A sequence's chunks have neighbouring slots; a slot may be empty. The
// host knows the number of slots without the lengths.
struct Chunks {
  const Sequence* list;  // [S] longest first, or null: every row of x is a sequence
  const Chunk* table;    // [slots], null with list
  int64_t S, T, rows;
  int length;             // L
  int64_t of_a_row, all;  // chunks: divided once, on the host

  __host__ DEVICE int64_t per_row() const { return of_a_row; }
  __host__ DEVICE int64_t slots() const { return all; }
  DEVICE int64_t first_slot(const Sequence& s) const {
    return list ? s.row / length + s.index : s.index * per_row();
  }
  DEVICE Sequence sequence(int64_t s) const { return list ? list[s] : Sequence{s, s * T, 0, T, 0}; }
  DEVICE static Chunk part(const Sequence& s, int64_t number, int length) {
    const int64_t first = number * length;
    const auto clip = [&](int64_t end) {
      const int64_t count = end - first;
      return int(count < 0 ? 0 : count < length ? count : length);
    };
    return {s.row + first, clip(s.length), clip(s.length + s.padding), int(s.index), int(number)};
  }
  DEVICE Chunk at(int64_t slot) const {
    if (table) return table[slot];
    const unsigned s = unsigned(slot) / unsigned(per_row());  // slots are less than 2^31
    return part(sequence(s), slot - s * per_row(), length);
  }
  __host__ DEVICE int tiles() const { return length / kTile; }
  DEVICE int64_t count(const Sequence& s) const {  // chunks with steps
    return (s.length + length - 1) / length;
  }
};

struct Rows {
  Chunks chunks;
  float2 *u, *w;            // [H, rows] base 2: whole number, rest
  float *past, *future;     // [H, rows]
  float *inflow, *outflow;  // [H, rows]
  float* floor;             // [H, rows] e^-m, 1 where held
  int* start;               // [rows] first visible row of the tile, counted from its first; kTile
                            // where held
  float* tile_decay;        // [H, slots, tiles]
  float* keep;              // [H, slots]

  DEVICE int64_t row(int head, const Chunk& chunk) const { return head * chunks.rows + chunk.row; }
  DEVICE int64_t slot(int head, int64_t slot) const { return head * chunks.slots() + slot; }
};

// The chunks of a call; the table is not made yet. p.chunk is rounded up to tiles.
inline Chunks chunks_of(const MlstmParams& p) {
  const int64_t longest = p.T < kLongestChunk ? p.T : kLongestChunk;
  const int64_t asked = p.chunk < longest ? p.chunk : longest;
  const int length = asked < kTile ? kTile : int(asked + kTile - 1) / kTile * kTile;
  const int64_t rows = p.B * p.T, of_a_row = (p.T + length - 1) / length;
  const int64_t all = p.sequences ? rows / length + p.S : p.S * of_a_row;
  if (rows > INT32_MAX) throw std::invalid_argument("tfla: too many rows");
  return {p.sequences, nullptr, p.S, p.T, rows, length, of_a_row, all};
}

// Of h: max(|total|, floor) + eps, NaN where the total is.
DEVICE float divisor(float total, float floor, double eps) {
  const float size = fabsf(total);
  return (size < floor ? floor : size) + float(eps);
}

// As many chunks are kept as there are, or none.
inline void check_kept(const MlstmParams& p, const Chunks& chunks) {
  if (p.kept == 0 || p.kept == chunks.slots()) return;
  throw std::invalid_argument("tfla: kept must be 0 or the number of chunks, " +
                              std::to_string(chunks.slots()) + ", got " + std::to_string(p.kept));
}

// Bytes of scratch that prepare_rows takes, and what it makes of them.
int64_t rows_scratch(const MlstmParams& p);
// Runs the pre-pass. last_m: [S, H] or null.
Rows prepare_rows(const MlstmParams& p, void* scratch, float* last_m, cudaStream_t stream);

}  // namespace flashcell::cuda
