// What call.h asks of the CUDA engine. Nothing here waits for the device or allocates; errors
// throw.
#pragma once
#include "../params.h"
#include "common/cuda/code.h"

using cudaStream_t = struct CUstream_st*;  // as CUDA declares it: ops.cpp needs no CUDA headers

namespace flashcell::cuda {

struct Device {  // what the plans need to know of a GPU
  Code code;     // that runs there
  int sms, shared_bytes;
  bool clusters;  // of thread blocks, on the GPU and in the code
};
Device current_device();  // an error where the library has no code for it

// Whether the kernels of chunk/ring.cuh run: they are compiled for sm_90a alone, and multiply 16
// bits.
constexpr bool has_wgmma(const Device& device, int io_bytes) {
  return device.code.sm_90a && device.shared_bytes >= 227 << 10 && io_bytes == 2;
}

struct Launch {
  Device device;
  Dtype dtype;  // not kDouble
  cudaStream_t stream;
  void* scratch;  // as many bytes as the function was asked for
};

int64_t scratch_bytes(const ForwardParams&, const Launch&);
int64_t scratch_bytes(const BackwardParams&, const Launch&);
int64_t scratch_bytes(const StepParams&, const Launch&);
int64_t scratch_bytes(const LinearStepParams&, const Launch&);
int64_t scratch_bytes(const NormStepParams&, const Launch&);
int64_t scratch_bytes(const GateStepParams&, const Launch&);
int64_t scratch_bytes(const EpilogueParams&, const Launch&);
int64_t scratch_bytes(const EpilogueBackwardParams&, const Launch&);
void run(const ForwardParams&, const Launch&);
void run(const BackwardParams&, const Launch&);
void run(const StepParams&, const Launch&);
void run(const LinearStepParams&, const Launch&);
void run(const NormStepParams&, const Launch&);
void run(const GateStepParams&, const Launch&);
void run(const EpilogueParams&, const Launch&);
void run(const EpilogueBackwardParams&, const Launch&);

}  // namespace flashcell::cuda
