// Decides whether the gemm engine runs a call. It computes every time step with a matrix product,
// of cuBLAS or in exact fp32 of split.h, and a kernel for the cells: the product runs at the full
// rate of the GPU, but every step costs two launches.
#pragma once
#include <cstdint>

#include "../../params.h"
#include "../engine.h"
#include "split.h"

namespace flashcell::cuda::gemm {

constexpr size_t kWorkspaceBytes = size_t(32) << 20;  // what cuBLAS recommends for Hopper
// From kLeastSteps on, steps run as a CUDA graph of kGraphSteps steps that is launched again and
// again. For fewer steps, recording the graph takes longer than it saves.
constexpr int kGraphSteps = 8;
constexpr int64_t kLeastSteps = 40;
constexpr int kSequences = 8, kQuads = 32;  // per thread block; a quad is 4 units
constexpr int64_t kMostSequences = 65535 * int64_t(kSequences);  // a grid has 65,535 rows of blocks

struct Sizes {
  int64_t S, T, N, D;
  int gates, io_bytes;
  bool exact;  // fp32 products, not rounded to tf32
  bool split;  // which run on tensor cores (split.h)

  constexpr bool splits() const { return exact && split; }
};

// A step of the step engine takes so many us longer than one of this engine with split products:
// (products S N D D - weights N D D - values S N D) / 10^6 - launches.
struct Gain {
  double products, weights, values, launches;
};
// Forward and backward, of cells with 4, 3 and 1 gates; fitted to 264 to 2048 units and 8 to 256
// sequences on an H200 (NOTEBOOK.md, "The gemm engine"). Backward it is the step engine whose
// launches take longer. Outside a graph those of this engine do.
constexpr Gain kGains[2][3] = {{{1.14, 12, 0, 8.7}, {0.6, 9, 0, 8}, {0.47, 3, 0, 5.9}},
                               {{2.36, 8, 248, -3.2}, {1.66, 6, 198, -3.6}, {0.54, 2, 77, -2.2}}};
constexpr double kWithoutGraph = 1.5;

constexpr bool is_faster_split(const Sizes& z, bool graph, bool backward) {
  const Gain& gain = kGains[backward][cost_row(z.gates)];
  const double S = double(z.S), units = double(z.N * z.D) / 1e6;
  const double us = units * ((gain.products * S - gain.weights) * double(z.D) - gain.values * S);
  return us >= gain.launches + (graph ? 0 : kWithoutGraph);
}

// Whether this engine is faster than the step engine for exact fp32. Without split products that
// was measured on an H200 with an LSTM and a GRU of 384 to 2048 units and 1 to 256 sequences;
// backward passes of fewer than 8 sequences with 336 to 2048 units.
constexpr bool is_faster_in_fp32(const Sizes& z, bool graph, bool backward) {
  if (z.split) return is_faster_split(z, graph, backward);
  const double size =
      double(z.D > 1024 ? z.S : z.S * z.N) * double(z.D) * z.gates;  // a step's gates
  if (!backward) {
    if (z.D > 1536) return size >= 150'000;
    return size >= (graph ? 120'000 : z.D <= 512 ? 220'000 : 150'000);
  }
  if (z.S < kLeastSplit && z.D >= (graph ? 256 : 512)) {
    return z.gates > 1 || z.N == 1 || z.S == 1;
  }
  if (graph) return z.D >= 512 || size >= 12'000;
  return size * double(z.D) >= 60'000'000;
}

// From how many rows, sequences of all heads, a backward step is faster than that of the grid
// engine: for heads up to a width, in 16 bits and in TF32, of cells with 4, 3 and 1 gates. Measured
// on an H200 (NOTEBOOK.md, "The gemm engine").
struct LeastRows {
  int64_t width;
  int rows[2][3];
};
constexpr LeastRows kLeastRows[] = {
    {256, {{4096, 4096, 4096}, {1500, 1500, 1700}}}, {320, {{800, 700, 900}, {950, 850, 1024}}},
    {448, {{640, 520, 820}, {820, 600, 850}}},       {576, {{530, 470, 680}, {620, 450, 640}}},
    {704, {{430, 260, 420}, {430, 115, 170}}},       {896, {{450, 200, 310}, {210, 190, 100}}},
    {1056, {{215, 190, 230}, {215, 130, 260}}},      {INT64_MAX, {{75, 65, 55}, {60, 95, 60}}}};
constexpr int64_t least_rows(const Sizes& z, Engine other) {
  // With 2048 sequences the cluster engine is still faster, by 5 to 25 % above 192 units.
  if (other == Engine::kCluster) return z.D > 192 ? 2560 : 4096;
  for (const LeastRows& least : kLeastRows) {
    if (z.D <= least.width) {
      return least.rows[z.io_bytes == 4][cost_row(z.gates)];
    }
  }
  return INT64_MAX;
}

// Whether this engine is faster than `other`, which runs the call otherwise. The limits of forward
// passes beside the grid engine were measured on an H100: a step takes at least 8 us in a graph,
// and 14 us without one.
constexpr bool is_faster(const Sizes& z, Engine other, bool backward) {
  const int64_t rows = z.S * z.N;
  const double units = double(rows) * double(z.D);
  const bool graph = z.T > kLeastSteps;
  if (other == Engine::kFma) {
    if (!z.exact) return false;
    if (z.D <= 128) return units > 1'048'576;
    return rows > (!z.split ? 768 : !backward ? 640 : z.gates == 1 ? 960 : 288);
  }
  if (other == Engine::kStep) {
    // One step alone has a product only if there is an h before it.
    if (z.T < 2 && z.io_bytes == 4) return units * double(z.D) >= 65e6;
    if (z.exact) return is_faster_in_fp32(z, graph, backward);
    // In TF32 a step of the step engine takes 44 us for 50 sequences of an LSTM of 1500 units. A
    // backward step takes longer than this engine's for one head, and as long for two heads of 2 to
    // 31 sequences.
    if (z.io_bytes == 4 && backward && z.D > 1024 && z.N <= 2) {
      return z.N == 1 || z.S == 1 || z.S >= 32;
    }
    if (z.io_bytes == 4) return units * double(z.D) >= (graph ? 45e6 : 65e6);
    return units * double(z.D) >= (graph ? 70e6 : 150e6);
  }
  if (backward) {
    if (other != Engine::kGrid && other != Engine::kCluster) return false;
    const int64_t least = least_rows(z, other);
    return rows > (graph ? least : least * 3 / 2);
  }
  if (other != Engine::kGrid || z.D < 384) return false;
  const int64_t least = z.io_bytes == 4 ? (z.D > 1056  ? 96
                                           : z.D > 512 ? 176
                                           : z.D > 448 ? 1024
                                                       : INT32_MAX)
                        : z.D > 1056    ? 96
                        : z.D > 768     ? 288
                                        : 896;
  return rows > (graph ? least : least * 3 / 2);
}

// The parts of a backward product, which the cells add up: of several heads, one part a gate. One
// product a head would leave most of the GPU idle, because cuBLAS does not split the sums of a
// batch of products. On an H200 two heads of 1280 units and 32 sequences take 62 us in parts, and
// 191 us without. From kMostParted sequences on, the products fill the GPU anyway.
constexpr int64_t kMostParted = 512;
constexpr int parts_of(const SequenceParams& p, int gates) {
  return p.heads > 1 && p.S <= kMostParted ? gates : 1;
}

// Where the engine's buffers lie in its scratch, in bytes from its start. cuBLAS's workspace is
// first.
struct Scratch {
  Split split;      // of exact products
  int parts;        // of a product, which the cells add up
  int64_t clock;    // int, the time of the graph's first step
  int64_t product;  // fp32, forward [S, heads, parts, G, D], backward [S, heads, parts, D]
  int64_t operand;  // io, forward [S, heads, D], backward [S, heads, G, D]; or split
  int64_t weight;   // io, [heads, G, D, D]; empty for one head in all; or split
  int64_t bytes;

  Scratch(const SequenceParams& p, int gates, int io_bytes, bool backward, const Launch& launch)
      : split(p, gates, backward, launch.device, io_bytes == 4 && !launch.tf32) {
    const int64_t units = p.S * p.heads * p.D;
    const auto next = [&](int64_t size) { return round_up(size, 256); };
    clock = int64_t(kWorkspaceBytes);
    product = clock + 256;
    parts = split.used ? split.tiles.parts : backward ? parts_of(p, gates) : 1;
    operand = product + next(units * parts * (backward ? 1 : gates) * int64_t(sizeof(float)));
    weight = operand +
             next(split.used ? 2 * split.operand.bytes : units * (backward ? gates : 1) * io_bytes);
    const int64_t copied = p.N > 1 ? gates * p.heads * p.D * p.D * io_bytes : 0;
    bytes = weight + next(split.used ? split.weight.bytes : copied);
  }
};

}  // namespace flashcell::cuda::gemm
