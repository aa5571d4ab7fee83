// Launches the step engine: one launch per step, for any width, any strides and exact fp32. A
// decoding step is one such launch. The host loops over all T steps, because only the device knows
// the lengths; sequences that have ended cost a launch little.
#pragma once
#include <type_traits>

#include "../launch.h"
#include "backward.cuh"
#include "dot.cuh"
#include "forward.cuh"
#include "matrix.cuh"
#include "scratch.h"

namespace flashcell::cuda {

// With fewer sequences than this, tensor cores are so idle that dot products are faster.
constexpr int64_t kMatrixSequences = 4;

inline bool aligned_to_vectors(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % sizeof(Vector) == 0;
}

// The grid of a product over `depth`, and how the depth is divided among the blocks of clusters so
// that a small product fills the GPU.
template <typename Product>
struct StepGrid {
  int64_t units, sequences;  // numbers of tiles
  int rank_bits = 0, share;

  StepGrid(const SequenceParams& p, int64_t depth, bool clusters, const Device& device)
      : units((p.D + Product::kUnits - 1) / Product::kUnits),
        sequences((p.S + Product::kSequences - 1) / Product::kSequences) {
    const int64_t tiles = units * p.N * sequences;
    const int64_t steps = (depth + Product::kQuantum - 1) / Product::kQuantum;
    const int64_t least = Product::kDeep;  // one step of the depth for every warp of every rank
    while (clusters && rank_bits < 3 && (tiles << rank_bits) * 2 <= device.sms &&
           steps >= (2 * least) << rank_bits) {
      ++rank_bits;
    }
    share = int((steps + (1 << rank_bits) - 1) >> rank_bits) * Product::kQuantum;
  }
};

// Enqueues `count` launches of a kernel: for the steps first, first + direction, ...
template <typename Product, typename Params>
void run_steps(void (*kernel)(Params, Step), const Params& p, int64_t depth, int64_t first,
               int64_t count, int direction, void* operand, const Launch& launch) {
  if (p.S == 0 || p.N == 0 || p.D == 0) return;
  // Only code compiled for sm_90 or later uses clusters and waits for the preceding launch.
  const bool hopper = launch.device.code.arch >= 90;
  const StepGrid<Product> grid(p, depth, hopper && Product::kDeep > 1, launch.device);
  if (Product::kSharedBytes > 48 * 1024) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               Product::kSharedBytes));
  }
  cudaLaunchAttribute chosen[2];
  cudaLaunchConfig_t config = {};
  config.gridDim =
      dim3(unsigned(grid.sequences) << grid.rank_bits, unsigned(grid.units), unsigned(p.N));
  config.blockDim = dim3(Product::kThreads);
  config.dynamicSmemBytes = Product::kSharedBytes;
  config.stream = launch.stream;
  config.attrs = chosen;
  if (grid.rank_bits > 0) {
    cudaLaunchAttribute& cluster = chosen[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {1u << grid.rank_bits, 1, 1};
  }
  if (hopper) {
    cudaLaunchAttribute& overlap = chosen[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  for (int64_t i = 0; i < count; ++i) {
    const Step step{int(first + i * direction),
                    i > 0,
                    grid.rank_bits,
                    grid.share,
                    int(p.N),
                    int(p.D),
                    int(p.N * p.D),
                    p.S * p.N * p.D,
                    operand};
    check(cudaLaunchKernelEx(&config, kernel, p, step));
  }
}

template <typename Cell, typename IO, typename Product>
void forward_steps(const ForwardParams& p, const Launch& launch) {
  // Step 0 also passes on the states of sequences without any step.
  run_steps<Product>(&forward_step_kernel<Cell, IO, Product>, p, p.D, 0, p.T > 1 ? p.T : 1, 1,
                     p.T > 1 ? launch.scratch : nullptr, launch);
}

template <typename Cell, typename IO, typename Product>
void backward_steps(const BackwardParams& p, const Launch& launch) {
  // Step -1 adds the product of step 0 to the gradients of the initial states, and passes on those
  // of sequences without any step.
  const int64_t steps = p.T + (p.T == 0 || !p.skips_initial);
  run_steps<Product>(&backward_step_kernel<Cell, IO, Product>, p, Cell::kGates * p.D, p.T - 1,
                     steps, -1, nullptr, launch);
}

// Whether a product's shared memory, and its places, fit in a thread block.
template <typename Product>
bool fits(const Launch& launch) {
  constexpr int kBytes = Product::kSharedBytes + int(sizeof(Places<Product::kSequences>));
  return kBytes <= launch.device.shared_bytes;
}

template <typename Cell, typename IO>
void forward_step(const ForwardParams& p, const Launch& launch) {
  constexpr int kGates = Cell::kGates;
  const bool vectors = p.D % IoTraits<IO>::kVector == 0 && aligned_to_vectors(p.weight) &&
                       aligned_to_vectors(p.initial) && aligned_to_vectors(launch.scratch);
  // Where h is 0 nothing may read the weight, but kernels with matrix instructions load it in any
  // case.
  const bool matrix =
      vectors && (sizeof(IO) == 2 || launch.tf32) && p.S >= kMatrixSequences && !p.h_begins_as_zero;
  // Wide tiles read less, but there are fewer of them: for small heads SMs would stay idle. Turing
  // has no room for some.
  using Narrow = ForwardMatrix<kGates, IO, 2>;
  using Wide = ForwardMatrix<kGates, IO, 8>;
  if (matrix && (p.S <= 16 || p.D <= 128 || !fits<Wide>(launch))) {
    forward_steps<Cell, IO, Narrow>(p, launch);
  } else if (matrix) {
    forward_steps<Cell, IO, Wide>(p, launch);
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
  const bool matrix = p.D % IoTraits<IO>::kVector == 0 && (sizeof(IO) == 2 || launch.tf32) &&
                      aligned_to_vectors(p.weight) && aligned_to_vectors(p.dx) &&
                      aligned_to_vectors(p.dr);
  using Narrow = BackwardMatrix<kGates, IO, 2>;
  using Wide = BackwardMatrix<kGates, IO, 4>;
  if (matrix && (p.S <= 16 || !fits<Wide>(launch))) {
    backward_steps<Cell, IO, Narrow>(p, launch);
  } else if (matrix) {
    backward_steps<Cell, IO, Wide>(p, launch);
  } else {
    backward_steps<Cell, IO, BackwardDot<kGates, IO, 8>>(p, launch);
  }
}

}  // namespace flashcell::cuda
