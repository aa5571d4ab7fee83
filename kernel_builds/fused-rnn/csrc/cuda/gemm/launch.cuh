// Launches the gemm engine: for every time step a matrix product of cuBLAS, then a kernel that
// computes the cells.
#pragma once
#include "backward.cuh"
#include "forward.cuh"
#include "graph.cuh"

namespace flashcell::cuda {

namespace gemm {

template <typename Params>
void launch_cells(void (*kernel)(Params, Step), const Params& p, const Step& step,
                  const Launch& launch) {
  const dim3 grid(unsigned((step.ND / kQuad + kQuads - 1) / kQuads),
                  unsigned((p.S + kSequences - 1) / kSequences));
  kernel<<<grid, kSequences * kQuads, 0, launch.stream>>>(p, step);
  check(cudaGetLastError());
}

template <typename Cell, typename IO, typename V>
void run_forward(const ForwardParams& p, const Launch& launch) {
  const Scratch places(p, Cell::kGates, sizeof(IO), false);
  char* scratch = static_cast<char*>(launch.scratch);
  float* product = reinterpret_cast<float*>(scratch + places.product);
  use_stream(launch);
  const void* weight = pack_weight(p, Cell::kGates, sizeof(IO), scratch + places.weight, launch);
  Step step{0,
            nullptr,
            p.initial != nullptr,
            int(p.D),
            int(p.N * p.D),
            p.S * p.N * p.D,
            product,
            scratch + places.operand,
            1};
  const auto run = [&](const Launch& on, int t, const int* clock) {
    if (step.has_product) {
      multiply<IO>(weight, step.operand, product, true, p.S, p.N, p.D, Cell::kGates * p.D, on);
    }
    step.t = t, step.clock = clock;
    launch_cells(&forward_cells_kernel<Cell, IO, V>, p, step, on);
  };
  if (step.has_product) launch_cells(&first_operand_kernel<IO>, p, step, launch);
  run(launch, 0, nullptr);  // also copies the states of sequences that have no steps
  step.has_product = true;
  run_steps(1, p.T - 1, 1, reinterpret_cast<int*>(scratch + places.clock), launch, run);
}

template <typename Cell, typename IO, typename V>
void run_backward(const BackwardParams& p, const Launch& launch) {
  const Scratch places(p, Cell::kGates, sizeof(IO), true);
  char* scratch = static_cast<char*>(launch.scratch);
  float* product = reinterpret_cast<float*>(scratch + places.product);
  use_stream(launch);
  const void* weight = pack_weight(p, Cell::kGates, sizeof(IO), scratch + places.weight, launch);
  Step step{0,
            nullptr,
            false,
            int(p.D),
            int(p.N * p.D),
            p.S * p.N * p.D,
            product,
            scratch + places.operand,
            parts_of(p, Cell::kGates)};
  const int64_t heads = p.N * step.parts, depth = Cell::kGates * p.D / step.parts;
  const auto run = [&](const Launch& on, int t, const int* clock) {
    if (step.has_product) {
      multiply<IO>(weight, step.operand, product, false, p.S, heads, depth, p.D, on);
    }
    step.t = t, step.clock = clock;
    launch_cells(&backward_cells_kernel<Cell, IO, V>, p, step, on);
  };
  run(launch, int(p.T) - 1, nullptr);
  step.has_product = true;
  // Step -1 adds the product of step 0 to the gradients of the initial states.
  run_steps(int(p.T) - 2, p.T, -1, reinterpret_cast<int*>(scratch + places.clock), launch, run);
}

}  // namespace gemm

template <typename Cell, typename IO>
void forward_gemm(const ForwardParams& p, const Launch& launch) {
  if (p.S == 0) return;
  if constexpr (sizeof(IO) == 4) {
    if (!launch.tf32) return gemm::run_forward<Cell, IO, float>(p, launch);
  }
  gemm::run_forward<Cell, IO, typename IoTraits<IO>::Value>(p, launch);
}

template <typename Cell, typename IO>
void backward_gemm(const BackwardParams& p, const Launch& launch) {
  if (p.S == 0) return;
  if constexpr (sizeof(IO) == 4) {
    if (!launch.tf32) return gemm::run_backward<Cell, IO, float>(p, launch);
  }
  gemm::run_backward<Cell, IO, typename IoTraits<IO>::Value>(p, launch);
}

}  // namespace flashcell::cuda
