// Chooses how the time loop is divided among threads: a pure function of the shape.
#pragma once
#include "common/cpu/scratch.h"
#include "engine.h"

namespace flashcell::FLASHCELL_ISA {

// By task: every thread runs through time on its own, for its own (head, rows) tiles, without
// barriers. By step: all threads share every step, each with its own units; this takes one barrier
// a step, but a core streams only its share of the weights.
struct Plan {
  bool by_task;
  int64_t rows;      // sequences of a task
  int64_t together;  // of these, how many go through a step before the others begin
};

constexpr int64_t kRowGroup = 8;  // sequences that share a partial sum of the bias gradient
constexpr int64_t kCacheBytes = 768 * 1024;  // weights of a head that fit in a core's cache
// Sequences of a task whose weights stay in cache go through time in tiles: the states of a tile
// stay in cache too, and the next step's rows of memory follow those of the present one.
constexpr int64_t kTileRows = 32;

inline __attribute__((always_inline)) Plan make_plan(int64_t S, int64_t N, int64_t weight_bytes,
                                                     int64_t weight_count, int threads) {
  const int64_t together = weight_bytes > kCacheBytes || S <= kTileRows ? S : kTileRows;
  if (threads == 1 || S == 0) return {true, S, together};
  if (weight_bytes > kCacheBytes) {
    // Splitting the rows of a head would stream its weights once per part.
    return {N >= 4 * threads || N % threads == 0, S, S};
  }
  const int64_t groups = (S + kRowGroup - 1) / kRowGroup;
  int64_t parts = 1;  // the smallest number of row tiles that keeps all threads busy
  while (parts < groups && N * parts < 4 * threads && (N * parts) % threads != 0) ++parts;
  const int64_t rows = (groups + parts - 1) / parts * kRowGroup;
  const bool busy = N * ((S + rows - 1) / rows) >= threads;
  return {busy || S * N * weight_count < kBarrierMultiplyAdds, rows, together};
}

}  // namespace flashcell::FLASHCELL_ISA
