// When the gemm engine runs a call: a matrix product of cuBLAS and one kernel for the cells, every
// step. Its products run at the rate of the tensor cores, but each costs two launches.
#pragma once
#include <cstdint>

#include "../../params.h"
#include "../engine.h"

namespace flashcell::cuda::gemm {

constexpr size_t kWorkspaceBytes = size_t(32) << 20;  // as cuBLAS recommends for Hopper
// As many steps repay a CUDA graph of a few of them, which is then launched again and again.
constexpr int kGraphSteps = 8;
constexpr int64_t kLeastSteps = 40;
constexpr int kSequences = 8, kQuads = 32;  // of a thread block: rows, and fours of units

struct Sizes {
  int64_t S, T, N, D;
  int gates, io_bytes;
  bool exact;  // fp32 whose products are not rounded to tf32
};

// Whether the engine is faster than the one that would run the call otherwise. Measured on an H100
// (NOTEBOOK.md, "The gemm engine"): a step takes at least 8 us, or 14 where too few repay a graph.
constexpr bool is_faster(const Sizes& z, Engine other, const Device&) {
  const int64_t rows = z.S * z.N;
  const double units = double(rows) * double(z.D);
  const bool graph = z.T > kLeastSteps;
  if (other == Engine::kStep) {
    return z.exact ? units >= (graph ? 24'576 : 49'152)
                   : units * double(z.D) >= (graph ? 70'000'000 : 150'000'000);
  }
  if (other != Engine::kGrid || z.D < 384) return false;
  const int64_t least = z.io_bytes == 4 ? (z.D > 512   ? 176
                                           : z.D > 448 ? 1024
                                                       : INT32_MAX)
                        : z.D > 1056    ? 96
                        : z.D > 768     ? 288
                                        : 896;
  return rows > (graph ? least : least * 3 / 2);
}

// What the engine keeps in memory from launch to launch, in bytes from the start of its scratch.
struct Scratch {
  int64_t clock;    // the time of a graph's first step; before it, cuBLAS's workspace
  int64_t product;  // [S, N, G, D] fp32, of backward [S, N, D]
  int64_t operand;  // [S, N, D] io, of backward [S, N, G, D]
  int64_t weight;   // [N, G, D, D] io, where there are several heads
  int64_t bytes;

  Scratch(const SequenceParams& p, int gates, int io_bytes, bool backward) {
    const int64_t units = p.S * p.N * p.D;
    const auto next = [&](int64_t size) { return (size + 255) / 256 * 256; };
    clock = int64_t(kWorkspaceBytes);
    product = clock + 256;
    operand = product + next(units * (backward ? 1 : gates) * int64_t(sizeof(float)));
    weight = operand + next(units * (backward ? gates : 1) * io_bytes);
    bytes = weight + (p.N > 1 ? next(gates * p.N * p.D * p.D * io_bytes) : 0);
  }
};

}  // namespace flashcell::cuda::gemm
