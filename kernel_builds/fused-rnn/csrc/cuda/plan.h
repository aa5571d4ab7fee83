// Which engine runs a call: one pure function of sizes and of the GPU. Every limit stands beside
// what set it; a width the tuned engines do not take goes to the step engine.
#pragma once
#include <cstdint>

#include "cluster/plan.h"
#include "grid/plan.h"
#include "tiles.h"

namespace flashcell::cuda {

struct Problem {
  int64_t S, T, N, D;
  int gates;
  int io_bytes;  // 2 or 4
  bool tf32;
  bool aligned;  // x can be read 16 bytes at a time
};

// Sequences of a thread block of the block engine. Of the matrix instruction's eight columns half
// stay empty when that gives more SMs something to do: the cell takes longer than the
// products.
constexpr int block_tile(const Problem& p, const Device& device) {
  return p.N * ((p.S + 3) / 4) <= device.sms ? 4 : 8;
}

// Sequences that share a row of dbias_partial.
constexpr int tile_of(Engine engine, const Problem& p, const Device& device) {
  if (engine == Engine::kBlock) return block_tile(p, device);
  return engine == Engine::kCluster ? cluster::tile(p.S, p.N, p.D, device) : 8;
}

constexpr Engine select_engine(const Problem& p, const Device& device) {
  const bool whole_vectors = p.D % (16 / p.io_bytes) == 0 && p.aligned;
  const bool tensor_cores = p.io_bytes == 2 || p.tf32;
  if (p.T <= 1 || !whole_vectors || !tensor_cores) return Engine::kStep;
  if (p.D * p.io_bytes <= tiles::kBlockRowBytes) return Engine::kBlock;
  if (cluster::fits(p.D, p.io_bytes, device) && cluster::is_fastest(p.S, p.N, p.D, device)) {
    return Engine::kCluster;
  }
  return grid::fits_every_cell(p.gates, p.io_bytes, p.D, device) ? Engine::kGrid : Engine::kStep;
}

}  // namespace flashcell::cuda
