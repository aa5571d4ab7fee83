// The wide engine, for heads that are wide, of more than 256 units, in exact fp32: all thread
// blocks run at once. Each keeps the weight of some units of a head in shared memory, in exact
// fp32, and they exchange h (backward: dr) through L2 after every step, as in the grid engine.
//
// A step of a thread block: all threads wait for the operand and stage it in shared memory; each
// warp multiplies it by the rows of a task, for a slice of the depth (product.cuh); each thread
// adds up the slices of a cell, runs the cell and stores what the other thread blocks wait for. A
// thread block with more than eight sequences takes them in passes. Of weights that are larger than
// the shared memory of all SMs, a part streams in from the L2 cache at every step; the backward
// pass reads it from a transposed copy.
//
// The least time of a step (H200): 0.7 us from a store to the load that sees it, 0.3 us for the
// sums over the lanes, the cell and two barriers, and the product, which reads every weight in
// shared memory once for up to eight sequences: of 1024 units of an lstm 128 KB, 0.6 us.
#pragma once
#include "../launch.h"
#include "backward.cuh"
#include "forward.cuh"
#include "transpose.h"

namespace flashcell::cuda {

template <typename Pass>
__global__ void __launch_bounds__(wide::kThreads, 1) wide_kernel(
    const __grid_constant__ typename Pass::Params p, const __grid_constant__ wide::Memory m,
    int first_head, const float* transposed) {
  extern __shared__ __align__(16) char memory[];
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __trap();  // the planner chooses this kernel only where it is compiled
#else
  Pass::run(p, m, first_head, transposed, reinterpret_cast<float*>(memory));
#endif
}

template <typename Pass>
void launch_wide(const typename Pass::Params& p, const wide::Partition& partition, wide::Memory m,
                 const float* transposed, const Launch& launch) {
  m.groups = partition.groups, m.members = partition.members;
  const auto kernel = &wide_kernel<Pass>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             launch.device.shared_bytes));
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative, attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(wide::kThreads), config.dynamicSmemBytes = size_t(m.bytes());
  config.stream = launch.stream, config.attrs = &attribute, config.numAttrs = 1;
  const int64_t end = p.first_head + p.heads;
  for (int64_t head = p.first_head; head < end; head += partition.heads) {
    m.heads = int(std::min<int64_t>(partition.heads, end - head));
    config.gridDim = dim3(unsigned(m.heads * m.groups * m.members));
    check(cudaLaunchKernelEx(&config, kernel, p, m, int(head), transposed));
  }
}

// Calls a function with the number of sequences of a pass that a kernel is compiled for.
template <typename Function>
void with_wide_pass(int pass, Function function) {
  if (pass == 2) return function.template operator()<2>();
  if (pass == 4) return function.template operator()<4>();
  function.template operator()<8>();
}

template <typename Cell>
wide::Partition wide_partition(const SequenceParams& p, const Launch& launch) {
  const auto partition = wide::partition({p.S, p.heads, p.D, Cell::kGates}, launch.device);
  if (partition.heads == 0) {
    throw std::runtime_error("fused_rnn: the wide engine cannot run heads of width " +
                             std::to_string(p.D) + " on this GPU");
  }
  return partition;
}

template <typename Cell, typename IO>
void forward_wide(const ForwardParams& p, const Launch& launch) {
  const auto partition = wide_partition<Cell>(p, launch);
  const int units = partition.units, tile = partition.tile;
  const auto product = wide::forward_product(Cell::kGates, p.D, units);
  const auto m = wide::memory(product, kSizesOf<Cell>, units, tile, launch.device.shared_bytes);
  if (p.T > 1) fill_exchanged<float>(p, p.h, 1, launch);
  with_wide_pass(m.pass, [&]<int kSequences>() {
    launch_wide<WideForward<Cell, kSequences>>(p, partition, m, nullptr, launch);
  });
}

template <typename Cell, typename IO>
void backward_wide(const BackwardParams& p, const Launch& launch) {
  const auto partition = wide_partition<Cell>(p, launch);
  const int units = partition.units, tile = partition.tile;
  const auto product = wide::backward_product(Cell::kGates, p.D, units);
  const auto m = wide::memory(product, kSizesOf<Cell>, units, tile, launch.device.shared_bytes);
  fill_exchanged<float>(p, Cell::kSplitGrad ? p.dr : p.dx, Cell::kGates, launch);
  float* const transposed = m.streams() ? static_cast<float*>(launch.scratch) : nullptr;
  if (m.streams()) wide::transpose_weight(p, Cell::kGates, transposed, launch.stream);
  with_wide_pass(m.pass, [&]<int kSequences>() {
    launch_wide<WideBackward<Cell, kSequences>>(p, partition, m, transposed, launch);
  });
}

}  // namespace flashcell::cuda
