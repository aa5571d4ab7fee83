// What call.h asks of the CUDA engine. Nothing here waits for the device or allocates; errors
// throw.
#pragma once
#include "../params.h"

using cudaStream_t = struct CUstream_st*;  // as CUDA declares it: ops.cpp needs no CUDA headers

namespace flashcell::cuda {

struct Device {
  int arch;  // 90 for compute capability 9.0
  int processors;
};
Device describe(int index);

struct Call {
  Device device;
  Dtype dtype;  // not kDouble
  cudaStream_t stream;
  void* scratch;  // as many bytes as the function was asked for
};

int64_t scratch_bytes(const ForwardParams&, const Call&);
int64_t scratch_bytes(const BackwardParams&, const Call&);
int64_t scratch_bytes(const StepParams&, const Call&);
void run(const ForwardParams&, const Call&);
void run(const BackwardParams&, const Call&);
void run(const StepParams&, const Call&);

// The engines, one for every I/O type.
int64_t step_scratch(const StepParams& p);
template <typename IO>
void run_step(const StepParams& p, void* scratch, cudaStream_t stream);

}  // namespace flashcell::cuda
