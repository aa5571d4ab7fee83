// Calls the function that was compiled for a cell, an I/O dtype and the chosen engine.
#include <cuda_runtime.h>

#include "../cells/all.h"
#include "launch.h"

#include "batch/plan.h"
#include "cell/call.h"
#include "common/cuda/code.cuh"
#include "gemm/plan.h"
#include "run.h"
#include "step/scratch.h"
#include "tensor_core.cuh"
#include "wide/plan.h"

namespace flashcell::cuda {

static Device describe(int index) {
  int major, minor, sms, shared_bytes;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index));
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index));
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, index));
  check(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index));
  const Code code = find_code();
  return {major * 10 + minor, code, sms, usable_shared_bytes(code, shared_bytes)};
}
Device current_device() { return of_current_gpu(&describe); }

void refuse_cluster() {
  throw std::runtime_error(no_code("the cluster engine, which FLASHCELL_CUDA_ENGINE asks for,",
                                   "clusters need code for 9.0 or later",
                                   "unset FLASHCELL_CUDA_ENGINE"));
}

bool is_recording(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
    cudaGetLastError();
    return true;
  }
  return status != cudaStreamCaptureStatusNone;
}

template <typename Function>
static void with_io(Dtype dtype, Function function) {
  switch (dtype) {
    case Dtype::kBFloat16:
      return function.template operator()<bf16>();
    case Dtype::kHalf:
      return function.template operator()<fp16>();
    case Dtype::kFloat:
      return function.template operator()<float>();
    case Dtype::kDouble:
      break;
  }
  throw std::invalid_argument("fused_rnn: no CUDA engine for float64");
}

template <typename... Cells, typename Function>
static void with_cell(CellList<Cells...>, int cell, Function function) {
  int index = 0;
  ((index++ == cell ? function.template operator()<Cells>() : void()), ...);
}

// Calls `function` with the cell's and the I/O type.
template <typename Function>
static void with_types(int cell, Dtype dtype, Function function) {
  with_cell(AllCells(), cell, [&]<typename Cell>() {
    with_io(dtype, [&]<typename IO>() { function.template operator()<Cell, IO>(); });
  });
}

static CellSizes sizes_of(int cell) {
  CellSizes sizes{};
  with_cell(AllCells(), cell, [&]<typename Cell>() { sizes = kSizesOf<Cell>; });
  return sizes;
}

int64_t backward_scratch(int cell, const BackwardParams& p, Dtype dtype, const Launch& launch) {
  if (is_cut(p)) return 0;
  if (launch.engine == Engine::kWide) {
    const CellSizes sizes = sizes_of(cell);
    return wide::transposed_bytes({p.S, p.heads, p.D, sizes.gates}, sizes, launch.device);
  }
  if (launch.engine != Engine::kGemm) return 0;
  return gemm::Scratch(p, sizes_of(cell).gates, dtype == Dtype::kFloat ? 4 : 2, true, launch).bytes;
}

int64_t forward_scratch(int cell, const ForwardParams& p, Dtype dtype, const Launch& launch) {
  const int io_bytes = dtype == Dtype::kFloat ? 4 : 2;
  if (launch.engine == Engine::kStep) return step_scratch(p, io_bytes);
  if (launch.engine == Engine::kGemm)
    return gemm::Scratch(p, sizes_of(cell).gates, io_bytes, false, launch).bytes;
  if (launch.engine == Engine::kBatch)
    return batch::scratch_bytes(p, sizes_of(cell), io_bytes, launch.device);
  const bool rounds = launch.engine == Engine::kGrid && p.initial != nullptr;
  return rounds ? p.S * p.N * p.D * io_bytes : 0;  // memory for the first operand
}

void forward(int cell, const ForwardParams& p, Dtype dtype, const Launch& launch) {
  with_types(cell, dtype, [&]<typename Cell, typename IO>() {
    switch (launch.engine) {
      case Engine::kBlock:
        return forward_block<Cell, IO>(p, launch);
      case Engine::kCluster:
        if constexpr (sizeof(IO) == 2) return forward_cluster<Cell, IO>(p, launch);
        break;
      case Engine::kGrid:
        return forward_grid<Cell, IO>(p, launch);
      case Engine::kStep:
        return forward_step<Cell, IO>(p, launch);
      case Engine::kGemm:
        return forward_gemm<Cell, IO>(p, launch);
      case Engine::kFma:
        if constexpr (sizeof(IO) == 4) return forward_fma<Cell, IO>(p, launch);
        break;
      case Engine::kWide:
        if constexpr (sizeof(IO) == 4) return forward_wide<Cell, IO>(p, launch);
        break;
      case Engine::kBatch:
        if constexpr (batch::tiles(Cell::kGates, sizeof(IO)).count > 0) {
          return forward_batch<Cell, IO>(p, launch);
        }
        break;
    }
  });
}

void backward(int cell, const BackwardParams& p, Dtype dtype, const Launch& launch) {
  with_types(cell, dtype, [&]<typename Cell, typename IO>() {
    if (is_cut(p)) return backward_cut<Cell, IO>(p, launch);
    switch (launch.engine) {
      case Engine::kBlock:
        return backward_block<Cell, IO>(p, launch);
      case Engine::kCluster:
        if constexpr (sizeof(IO) == 2) return backward_cluster<Cell, IO>(p, launch);
        break;
      case Engine::kGrid:
        return backward_grid<Cell, IO>(p, launch);
      case Engine::kStep:
        return backward_step<Cell, IO>(p, launch);
      case Engine::kGemm:
        return backward_gemm<Cell, IO>(p, launch);
      case Engine::kFma:
        if constexpr (sizeof(IO) == 4) return backward_fma<Cell, IO>(p, launch);
        break;
      case Engine::kWide:
        if constexpr (sizeof(IO) == 4) return backward_wide<Cell, IO>(p, launch);
        break;
      case Engine::kBatch:  // never chosen for a backward pass
        break;
    }
  });
}

void cell_forward(int cell, const CellForward& p, Dtype dtype, const Launch& launch) {
  with_types(cell, dtype, [&]<typename Cell, typename IO>() {
    if constexpr (kIsTorchCell<Cell>) forward_cell<Cell, IO>(p, launch);
  });
}

void cell_backward(int cell, const CellBackward& p, Dtype dtype, const Launch& launch) {
  with_types(cell, dtype, [&]<typename Cell, typename IO>() {
    if constexpr (kIsTorchCell<Cell>) backward_cell<Cell, IO>(p, launch);
  });
}

}  // namespace flashcell::cuda
