// Calls the functions that were compiled for the dtype of a call.
#include <cuda_runtime.h>

#include "backward/run.h"
#include "chunk/loads.cuh"
#include "epilogue/run.h"
#include "forward/run.h"
#include "launch.h"

#include "common/cuda/code.cuh"
#include "common/cuda/sequence_table.cuh"
#include "run.h"
#include "step/linear.h"
#include "step/run.h"

namespace flashcell::cuda {

static Device describe(int index) {
  const auto read = [index](cudaDeviceAttr attribute) {
    int value;
    check(cudaDeviceGetAttribute(&value, attribute, index));
    return value;
  };
  const Code code = find_code();
  return {code, read(cudaDevAttrMultiProcessorCount),
          usable_shared_bytes(code, read(cudaDevAttrMaxSharedMemoryPerBlockOptin)),
          code.arch >= 90 && read(cudaDevAttrClusterLaunch) != 0};
}
Device current_device() { return of_current_gpu(&describe); }

void sequence_table(Sequence* table, int64_t S, int64_t T, const void* values, bool is_int32,
                    bool is_cu_seqlens, int64_t x_batch, int64_t x_time, cudaStream_t stream) {
  launch_sequence_table(table, S, T, values, is_int32, is_cu_seqlens, x_batch, x_time, stream);
  check(cudaGetLastError());
}

namespace {

template <typename Function>
auto with_io(Dtype dtype, const Function& function) {
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
  throw std::invalid_argument("tfla: no CUDA engine for float64");
}

template <typename Function>
void with_16_bits(Dtype dtype, const Function& function) {
  if (dtype == Dtype::kHalf) {
    function.template operator()<fp16>();
  } else {
    function.template operator()<bf16>();
  }
}

// Limits the chunk length to what the shared memory of a thread block holds: 256 steps on sm_90 and
// sm_100, 128 on sm_80, and 64 on sm_75, and for fp32 where a block has 99 KB. A caller that keeps
// states has counted longer chunks then, as on Hopper with a library for 7.5: the backward
// recomputes them.
template <typename Params>
Params fit_chunk(Params p, const Launch& launch) {
  const int io_bytes = launch.dtype == Dtype::kFloat ? 4 : 2;
  const int tiles = longest_chunk(io_bytes, launch.device);
  if (p.chunk > tiles) {
    p.chunk = tiles;
    if (p.kept != chunks_of(p).slots()) p.kept = 0, p.kept_C = p.kept_n = nullptr;
  }
  return p;
}

}  // namespace

int64_t scratch_bytes(const ForwardParams& p, const Launch& launch) {
  return with_io(launch.dtype, [&]<typename IO>() {
    return forward_scratch<IO>(fit_chunk(p, launch), launch.device);
  });
}
int64_t scratch_bytes(const BackwardParams& p, const Launch& launch) {
  return with_io(launch.dtype, [&]<typename IO>() {
    return backward_scratch<IO>(fit_chunk(p, launch), launch.device);
  });
}
int64_t scratch_bytes(const StepParams& p, const Launch&) { return step_scratch(p); }
int64_t scratch_bytes(const LinearStepParams&, const Launch&) { return 0; }
int64_t scratch_bytes(const NormStepParams&, const Launch&) { return 0; }
int64_t scratch_bytes(const GateStepParams&, const Launch&) { return 0; }
int64_t scratch_bytes(const EpilogueParams&, const Launch&) { return 0; }
int64_t scratch_bytes(const EpilogueBackwardParams& p, const Launch&) {
  return epilogue_scratch(p);
}

void run(const ForwardParams& p, const Launch& launch) {
  with_io(launch.dtype, [&]<typename IO>() {
    run_forward<IO>(fit_chunk(p, launch), launch.device, launch.scratch, launch.stream);
  });
}
void run(const BackwardParams& p, const Launch& launch) {
  with_io(launch.dtype, [&]<typename IO>() {
    run_backward<IO>(fit_chunk(p, launch), launch.device, launch.scratch, launch.stream);
  });
}
void run(const StepParams& p, const Launch& launch) {
  with_io(launch.dtype, [&]<typename IO>() {
    const auto run = p.ring.steps ? run_replay<IO> : run_step<IO>;
    run(p, launch.device, launch.scratch, launch.stream);
  });
}
void run(const LinearStepParams& p, const Launch& launch) {
  with_16_bits(launch.dtype,
               [&]<typename IO>() { run_linear_step<IO>(p, launch.device, launch.stream); });
}
void run(const NormStepParams& p, const Launch& launch) {
  with_16_bits(launch.dtype,
               [&]<typename IO>() { run_norm_step<IO>(p, launch.device, launch.stream); });
}
void run(const GateStepParams& p, const Launch& launch) {
  with_16_bits(launch.dtype,
               [&]<typename IO>() { run_gate_step<IO>(p, launch.device, launch.stream); });
}
void run(const EpilogueParams& p, const Launch& launch) {
  with_io(launch.dtype, [&]<typename IO>() { run_epilogue<IO>(p, launch.stream); });
}
void run(const EpilogueBackwardParams& p, const Launch& launch) {
  with_io(launch.dtype, [&]<typename IO>() { run_epilogue<IO>(p, launch.scratch, launch.stream); });
}

}  // namespace flashcell::cuda
