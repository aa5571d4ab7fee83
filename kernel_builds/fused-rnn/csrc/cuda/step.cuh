// The step engine, host side: one launch per step, for any width, any strides and exact fp32. A
// launch is also a decoding step. The steps are loops of the host over T, for lengths are known to
// the device alone; sequences that have ended cost a launch little.
#pragma once
#include <type_traits>

#include "launch.h"
#include "step_backward.cuh"
#include "step_dot.cuh"
#include "step_forward.cuh"
#include "step_matrix.cuh"
#include "step_scratch.h"

namespace flashcell::cuda {

// Fewer sequences than this leave tensor cores so idle that dot products are faster.
constexpr int64_t kMatrixSequences = 4;

inline bool aligned_to_vectors(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % sizeof(Vector) == 0;
}

// The grid of a product over `depth`, and how it divides over clusters so that a small product
// fills the GPU.
template <typename Product>
struct StepGrid {
  int64_t blocks;
  int ranks = 1, share;

  StepGrid(const SequenceParams& p, int64_t depth, bool clusters, const Device& device) {
    const int64_t tiles = (p.D + Product::kUnits - 1) / Product::kUnits * p.N *
                          ((p.S + Product::kSequences - 1) / Product::kSequences);
    const int64_t steps = (depth + Product::kQuantum - 1) / Product::kQuantum;
    const int64_t least = Product::kSlices;  // a step for every warp of every rank
    while (clusters && ranks < 8 && tiles * ranks * 2 <= device.processors &&
           steps >= 2 * ranks * least) {
      ranks *= 2;
    }
    blocks = tiles * ranks;
    share = int((steps + ranks - 1) / ranks * Product::kQuantum);
  }
};

// Enqueues steps first, first + direction, ... of a kernel.
template <typename Product, typename Params>
void run_steps(void (*kernel)(Params, Step), const Params& p, int64_t depth, int64_t first,
               int64_t count, int direction, void* operand, const Launch& launch) {
  if (p.S == 0 || p.N == 0 || p.D == 0) return;
  // Only code compiled for clusters knows how to use them, whatever the GPU.
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kernel));
  const bool clusters = launch.device.arch >= 90 && attributes.ptxVersion >= 90;
  const StepGrid<Product> grid(p, depth, clusters && Product::kSlices > 1, launch.device);
  if (Product::kSharedBytes > 48 * 1024) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               Product::kSharedBytes));
  }
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {unsigned(grid.ranks), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(grid.blocks));
  config.blockDim = dim3(Product::kThreads);
  config.dynamicSmemBytes = Product::kSharedBytes;
  config.stream = launch.stream;
  config.attrs = &cluster;
  config.numAttrs = grid.ranks > 1 ? 1 : 0;
  for (int64_t i = 0; i < count; ++i) {
    const Step step{int(first + i * direction), grid.ranks, grid.share, operand};
    check(cudaLaunchKernelEx(&config, kernel, p, step));
  }
}

template <typename Cell, typename IO, typename Product>
void forward_steps(const ForwardParams& p, const Launch& launch) {
  // Step 0 also passes the states of sequences without any step.
  run_steps<Product>(&forward_step_kernel<Cell, IO, Product>, p, p.D, 0, p.T > 1 ? p.T : 1, 1,
                     p.T > 1 ? launch.scratch : nullptr, launch);
}

template <typename Cell, typename IO, typename Product>
void backward_steps(const BackwardParams& p, const Launch& launch) {
  // Step -1 completes the gradient of the initial states.
  run_steps<Product>(&backward_step_kernel<Cell, IO, Product>, p, Cell::kGates * p.D, p.T - 1,
                     p.T + 1, -1, nullptr, launch);
}

template <typename Cell, typename IO>
void forward_step(const ForwardParams& p, const Launch& launch) {
  constexpr int kGates = Cell::kGates;
  const bool vectors = p.D % Lane<IO>::kVector == 0 && aligned_to_vectors(p.weight) &&
                       aligned_to_vectors(p.initial) && aligned_to_vectors(launch.scratch);
  const bool matrix = vectors && (sizeof(IO) == 2 || launch.tf32) && p.S >= kMatrixSequences;
  if (matrix && p.S <= 16) {
    forward_steps<Cell, IO, ForwardMatrix<kGates, IO, 2>>(p, launch);
  } else if (matrix) {
    forward_steps<Cell, IO, ForwardMatrix<kGates, IO, 8>>(p, launch);
  } else if (vectors && p.S == 1) {
    forward_steps<Cell, IO, ForwardDot<kGates, IO, 1, true>>(p, launch);
  } else if (vectors) {
    forward_steps<Cell, IO, ForwardDot<kGates, IO, 8, true>>(p, launch);
  } else {
    forward_steps<Cell, IO, ForwardDot<kGates, IO, 8, false>>(p, launch);
  }
}

template <typename Cell, typename IO>
void backward_step(const BackwardParams& p, const Launch& launch) {
  constexpr int kGates = Cell::kGates;
  const bool matrix = p.D % Lane<IO>::kVector == 0 && (sizeof(IO) == 2 || launch.tf32) &&
                      aligned_to_vectors(p.weight) && aligned_to_vectors(p.dx) &&
                      aligned_to_vectors(p.dr);
  if (matrix && p.S <= 16) {
    backward_steps<Cell, IO, BackwardMatrix<kGates, IO, 2>>(p, launch);
  } else if (matrix) {
    backward_steps<Cell, IO, BackwardMatrix<kGates, IO, 4>>(p, launch);
  } else {
    backward_steps<Cell, IO, BackwardDot<kGates, IO, 8>>(p, launch);
  }
}

}  // namespace flashcell::cuda
