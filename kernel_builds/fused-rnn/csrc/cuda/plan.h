// Chooses the engine for a call: a pure function of sizes and of the GPU. Every limit has its
// reason or measurement beside it. Widths that no other engine runs go to the step engine.
#pragma once
#include <cstdint>

#include "batch/plan.h"
#include "block/plan.h"
#include "cluster/plan.h"
#include "fma/plan.h"
#include "gemm/plan.h"
#include "grid/plan.h"
#include "wide/plan.h"

namespace flashcell::cuda {

struct Problem {
  int64_t S, T, N, D;
  int gates;
  int io_bytes;  // 2 or 4
  bool tf32;
  bool aligned;      // x can be read 16 bytes at a time
  bool keeps_state;  // of the cell: batch::keeps_state
  bool clips;        // states
  int64_t I = 0;     // the width of a layer's input that the batch engine multiplies as well
};

// Sequences of a thread block of the block engine. With four, half of the matrix instruction's
// columns stay empty. That pays if it puts more SMs to work, because the cell takes longer than the
// products.
constexpr int block_tile(const Problem& p, const Device& device) {
  return p.N * ((p.S + 3) / 4) <= device.sms ? 4 : 8;
}

// Sequences that share a row of dbias_partial.
constexpr int tile_of(Engine engine, const Problem& p, const Device& device) {
  if (engine == Engine::kBlock) return block_tile(p, device);
  if (engine == Engine::kFma) return fma::tile(p.S, p.N, p.D, p.gates, device);
  if (engine == Engine::kWide) return wide::partition({p.S, p.N, p.D, p.gates}, device).tile;
  return engine == Engine::kCluster ? cluster::tile(p.S, p.N, p.D, device) : 8;
}

// The limits that every engine except the step engine has.
constexpr std::array<Limit, 4> limits_of_all(const Problem& p) {
  return {{{"steps less than two", p.T <= 1, 0, ""},
           {"row in whole vectors, bytes over", p.D * p.io_bytes % 16, 0, "bytes"},
           {"x not aligned to 16 bytes", !p.aligned, 0, ""},
           {"states that are clipped", p.clips, 0, ""}}};
}

// Whether fp32 products are exact, because the caller wants it or because code for Turing has no
// tf32.
constexpr bool is_exact(const Problem& p, const Device& device) {
  return p.io_bytes == 4 && !(p.tf32 && has_tf32(device));
}

// The limit that the engines with matrix instructions have: block, cluster, grid and batch.
constexpr Limit limit_of_matrix(const Problem& p, const Device& device) {
  return {"exact fp32, which no matrix instruction has", is_exact(p, device), 0, ""};
}

constexpr bool fma_can_run(const Problem& p, const Device& device) {
  return all_hold(limits_of_all(p)) && all_hold(fma::limits(p.D, p.gates, p.io_bytes, device));
}

constexpr wide::Sizes wide_sizes(const Problem& p) { return {p.S, p.N, p.D, p.gates}; }
constexpr bool wide_can_run(const Problem& p, const Device& device) {
  return all_hold(limits_of_all(p)) && wide::can_run(wide_sizes(p), p.io_bytes, device);
}

// The engine that would run the call if there were no gemm and no fma engine.
constexpr Engine select_matrix(const Problem& p, const Device& device) {
  if (!all_hold(limits_of_all(p)) || !limit_of_matrix(p, device).holds()) return Engine::kStep;
  if (block::limit(p.D, p.io_bytes, device).holds()) return Engine::kBlock;
  if (cluster::fits(p.D, p.io_bytes, device) && cluster::is_fastest(p.S, p.N, p.D, device)) {
    return Engine::kCluster;
  }
  return grid::fits_every_cell(p.gates, p.io_bytes, p.D, device) ? Engine::kGrid : Engine::kStep;
}

constexpr gemm::Sizes gemm_sizes(const Problem& p, const Device& device) {
  return {p.S,
          p.T,
          p.N,
          p.D,
          p.gates,
          p.io_bytes,
          is_exact(p, device),
          device.code.sm_90a && p.S >= gemm::kLeastSplit};
}

constexpr bool gemm_can_run(const Problem& p) {
  return p.D * p.io_bytes % 16 == 0 && p.aligned && !p.clips && p.S <= gemm::kMostSequences;
}

// The engine that would run the call if there were no gemm engine.
constexpr Engine select_own(const Problem& p, const Device& device) {
  const Engine matrix = select_matrix(p, device);
  const bool fma = fma_can_run(p, device) && fma::is_faster(p.S, p.N, p.D, p.gates, matrix, device);
  return fma ? Engine::kFma : matrix;
}

// The engine that runs a part of the heads of a tensor; the step engine runs all of them.
constexpr Engine select_part(const Problem& p, const Device& device) {
  const Engine own = select_own(p, device);
  return own == Engine::kStep && gemm_can_run(p) ? Engine::kGemm : own;
}

// The engine if there were no batch and no wide engine.
constexpr Engine select_stepwise(const Problem& p, const Device& device, bool backward) {
  const Engine own = select_own(p, device);
  const bool gemm = gemm_can_run(p) && gemm::is_faster(gemm_sizes(p, device), own, backward);
  return gemm ? Engine::kGemm : own;
}

// The engine if there were no batch engine, which has no backward pass.
constexpr Engine select_other(const Problem& p, const Device& device, bool backward) {
  const bool wide = is_exact(p, device) && wide_can_run(p, device) &&
                    wide::is_faster(wide_sizes(p), p.T, backward, device);
  return wide ? Engine::kWide : select_stepwise(p, device, backward);
}

constexpr Engine select_backward(const Problem& p, const Device& device) {
  return select_other(p, device, true);
}

constexpr batch::Sizes batch_sizes(const Problem& p) {
  return {p.S, p.N, p.D, p.gates, p.io_bytes, p.keeps_state, false, p.I};
}

constexpr bool batch_can_run(const Problem& p, const Device& device) {
  return all_hold(limits_of_all(p)) && limit_of_matrix(p, device).holds() &&
         all_hold(batch::limits(batch_sizes(p), device));
}

// Whether the batch engine runs p, the recurrence of a layer of one head, and multiplies its input
// of I units as well. It does so for cells that read the input's product only as a part of the
// sums.
inline bool multiplies_input(const Problem& p, int64_t I, bool splits_gradient,
                             const Device& device) {
  if (splits_gradient || !batch_can_run(p, device)) return false;
  const Engine other = select_other(p, device, false);
  const batch::Sizes sizes = batch_sizes(p);
  return batch::other_us(sizes, other, device) > 0 &&
         batch::multiplies_input(sizes, I, p.T, other, device);
}

inline Engine select_engine(const Problem& p, const Device& device) {
  if (p.I > 0) return Engine::kBatch;
  const Engine other = select_other(p, device, false);
  const bool faster =
      batch_can_run(p, device) && batch::is_faster(batch_sizes(p), p.T, other, device);
  return faster ? Engine::kBatch : other;
}

// Whether FLASHCELL_CUDA_ENGINE may choose this engine for the call.
constexpr bool can_run(Engine engine, const Problem& p, const Device& device) {
  const Engine chosen = select_matrix(p, device);
  if (engine == Engine::kGemm) return gemm_can_run(p);
  if (engine == Engine::kFma) return fma_can_run(p, device);
  if (engine == Engine::kWide) return wide_can_run(p, device);
  if (engine == Engine::kBatch) return batch_can_run(p, device);
  if (engine == Engine::kStep || engine == chosen) return true;
  if (chosen == Engine::kStep) return false;
  return (engine == Engine::kCluster && cluster::fits(p.D, p.io_bytes, device)) ||
         (engine == Engine::kGrid && grid::fits_every_cell(p.gates, p.io_bytes, p.D, device));
}

}  // namespace flashcell::cuda
