// From a cell's name, an I/O dtype and the chosen engine to the function that runs it.
#include <cuda_runtime.h>

#include "launch.h"
#include "run.h"
#include "step_scratch.h"
#include "tensor_core.cuh"

namespace flashcell::cuda {

Device describe(int index) {
  int major, minor, processors, shared_bytes;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index));
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index));
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, index));
  check(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index));
  return {major * 10 + minor, processors, shared_bytes};
}

template <typename Function>
static void with_io(Dtype dtype, Function function) {
  switch (dtype) {
    case Dtype::kBFloat16:
      return function(bf16());
    case Dtype::kHalf:
      return function(fp16());
    case Dtype::kFloat:
      return function(float());
    case Dtype::kDouble:
      break;
  }
  throw std::invalid_argument("fused_rnn: no CUDA engine for float64");
}

static int io_bytes(Dtype dtype) { return dtype == Dtype::kFloat ? 4 : 2; }

template <typename Cell>
int64_t forward_scratch(const ForwardParams& p, Dtype dtype, const Launch& launch) {
  return launch.engine == Engine::kStep ? step_forward_scratch(p, io_bytes(dtype)) : 0;
}

template <typename Cell>
void forward(const ForwardParams& p, Dtype dtype, const Launch& launch) {
  with_io(dtype, [&](auto io) {
    using IO = decltype(io);
    switch (launch.engine) {
      case Engine::kBlock:
        return forward_block<Cell, IO>(p, launch);
      case Engine::kCluster:
        if constexpr (sizeof(IO) == 2) return forward_cluster<Cell, IO>(p, launch);
        break;
      case Engine::kChip:
        return forward_chip<Cell, IO>(p, launch);
      case Engine::kStep:
        return forward_step<Cell, IO>(p, launch);
    }
  });
}

template <typename Cell>
int64_t backward_scratch(const BackwardParams& p, Dtype dtype, const Launch& launch) {
  if (launch.engine != Engine::kStep) return 0;
  return step_backward_scratch(p, Cell::kGates, io_bytes(dtype));
}

template <typename Cell>
void backward(const BackwardParams& p, Dtype dtype, const Launch& launch) {
  with_io(dtype, [&](auto io) {
    using IO = decltype(io);
    switch (launch.engine) {
      case Engine::kBlock:
        return backward_block<Cell, IO>(p, launch);
      case Engine::kCluster:
        if constexpr (sizeof(IO) == 2) return backward_cluster<Cell, IO>(p, launch);
        break;
      case Engine::kChip:
        return backward_chip<Cell, IO>(p, launch);
      case Engine::kStep:
        return backward_step<Cell, IO>(p, launch);
    }
  });
}

template <typename... Cells>
static void instantiate(CellList<Cells...>) {
  // Taking the addresses makes every template above a symbol of this file.
  static const void* volatile used[] = {
      (const void*)&forward<Cells>..., (const void*)&backward<Cells>...,
      (const void*)&forward_scratch<Cells>..., (const void*)&backward_scratch<Cells>...};
  (void)used;
}
void instantiate_all() { instantiate(AllCells()); }

}  // namespace flashcell::cuda
