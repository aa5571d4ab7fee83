// The results of the gate pre-pass (prepass.cu): everything in the products that depends on the
// gates alone. Rows are those of x: b T + t. A chunk has L steps (a multiple of 64) in tiles of 64
// rows; the first chunk starts where its sequence starts.
//
// Let b be the sum of the log forget gates and m the scale. The weight of step j in row t's sum is,
// without K^-1/2 q k,
//   2^(u_t + w_j)                                     in the same tile, start_t <= j <= t
//   past_t (decays of the tiles in between) future_j  in an earlier tile of the chunk
//   inflow_t = past_t (decays of the earlier tiles)   for the state before the chunk
// and outflow_j = future_j (decays of the later tiles) is the weight of j in the state after the
// chunk, in which `keep` is the factor of the state before. All factors except 2^(u + w) are
// exponentials of values <= 0, without differences of large numbers. u and w are split into an
// integer and a remainder, so that their sum is exact however large both are. No factor crosses a
// reset: past is 0 from the reset on, and future is 0 before the last one. A held row has weights
// 0.
#pragma once
#include "../../params.h"
#include "../launch.h"
#include "common/cuda/device.cuh"

namespace flashcell::cuda {

constexpr int kTile = 64;                          // rows of a tile
constexpr int kLongestChunk = 256;                 // longer ones only add products
constexpr int kMostTiles = kLongestChunk / kTile;  // tiles of a chunk

struct Chunk {
  int64_t row;   // row of x of the first step: b T + t
  int steps;     // steps that run
  int rows;      // steps, and padding after them
  int sequence;  // row of the state tensors
  int number;    // number of the chunk in its sequence
};

// The chunks of a call. A sequence's chunks have consecutive slots, and a slot may be empty, so the
// host knows the number of slots without knowing the lengths.
struct Chunks {
  const Sequence* list;  // [S] longest first, or null: every row of x is a sequence
  const Chunk* table;    // [slots], null with list
  int64_t S, T, rows;
  int length;             // steps of a chunk (L in the equations)
  int64_t of_a_row, all;  // chunks of a row, and of all rows; divided once, on the host

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
    const unsigned s = unsigned(slot) / unsigned(per_row());  // slots are fewer than 2^31
    return part(sequence(s), slot - s * per_row(), length);
  }
  __host__ DEVICE int tiles() const { return length / kTile; }
  DEVICE int64_t count(const Sequence& s) const {  // number of chunks with steps
    return (s.length + length - 1) / length;
  }
};

struct Rows {
  Chunks chunks;
  float2 *u, *w;            // [H, rows] base 2: integer and remainder
  float *past, *future;     // [H, rows]
  float *inflow, *outflow;  // [H, rows]
  float* floor;             // [H, rows] e^-m, or 1 if held
  int* start;         // [rows] first visible row, counted from the tile's first; kTile if held
  float* tile_decay;  // [H, slots, tiles]
  float* keep;        // [H, slots]

  DEVICE int64_t row(int head, const Chunk& chunk) const { return head * chunks.rows + chunk.row; }
  DEVICE int64_t slot(int head, int64_t slot) const { return head * chunks.slots() + slot; }
};

// Returns the chunks of a call, without the table. p.chunk is rounded up to whole tiles.
inline Chunks chunks_of(const MlstmParams& p) {
  const int64_t longest = p.T < kLongestChunk ? p.T : kLongestChunk;
  const int64_t asked = p.chunk < longest ? p.chunk : longest;
  const int length = asked < kTile ? kTile : int(asked + kTile - 1) / kTile * kTile;
  const int64_t rows = p.B * p.T, of_a_row = (p.T + length - 1) / length;
  const int64_t all = p.sequences ? rows / length + p.S : p.S * of_a_row;
  if (rows > INT32_MAX) throw std::invalid_argument("tfla: too many rows");
  return {p.sequences, nullptr, p.S, p.T, rows, length, of_a_row, all};
}

// Returns the divisor of h: max(|total|, floor) + eps, or NaN if the total is NaN.
DEVICE float divisor(float total, float floor, double eps) {
  const float size = fabsf(total);
  return (size < floor ? floor : size) + float(eps);
}

// Throws unless the caller keeps the states of all chunks, or of none.
inline void check_kept(const MlstmParams& p, const Chunks& chunks) {
  if (p.kept == 0 || p.kept == chunks.slots()) return;
  throw std::invalid_argument("tfla: kept must be 0 or the number of chunks, " +
                              std::to_string(chunks.slots()) + ", got " + std::to_string(p.kept));
}

// rows_scratch returns the bytes of scratch that prepare_rows needs.
int64_t rows_scratch(const MlstmParams& p);
// Runs the pre-pass, and returns its results in that scratch. last_m is [S, H] or null.
Rows prepare_rows(const MlstmParams& p, void* scratch, float* last_m, cudaStream_t stream);

}  // namespace flashcell::cuda
