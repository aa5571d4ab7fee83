// Declares the functions that call.h calls. None of them waits for the device or allocates; errors
// throw.
#pragma once
#include "../params.h"
#include "common/cuda/code.h"

// Declared as in CUDA's headers, so that ops.cpp need not include them.
using cudaStream_t = struct CUstream_st*;

namespace flashcell::cuda {

struct Device {  // the properties of a GPU that the plans read
  Code code;     // describes the code object that runs on the GPU
  int sms, shared_bytes;
  bool clusters;  // whether the GPU and the code support thread block clusters
};
Device current_device();  // throws if the library has no code for the GPU

// Whether the kernels of chunk/ring.cuh can run: they are compiled for sm_90a only, and take 16-bit
// types.
constexpr bool has_wgmma(const Device& device, int io_bytes) {
  return device.code.sm_90a && device.shared_bytes >= 227 << 10 && io_bytes == 2;
}

struct Launch {
  Device device;
  Dtype dtype;  // any but kDouble
  cudaStream_t stream;
  void* scratch;  // as many bytes as scratch_bytes returned
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
