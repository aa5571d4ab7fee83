// What the engines offer to run.cu: one function for each direction, instantiated for every cell in
// a source file of its own. Nothing here waits for the device or allocates; errors throw.
#pragma once
#include "../params.h"
#include "common/cuda/code.h"

using cudaStream_t = struct CUstream_st*;  // as CUDA declares it: ops.cpp needs no CUDA headers

namespace flashcell::cuda {

struct Device {  // what the plan needs to know of a GPU
  int arch;      // 90 for compute capability 9.0
  Code code;     // that runs there
  int sms;
};

struct Launch {
  Device device;
  cudaStream_t stream;
  Dtype dtype;
  int together;   // neighbouring channels that can be one word: 1, 2, 4 or 8
  void* scratch;  // as many bytes as the function was asked for
};

template <typename Cell>
struct Engine {
  static int64_t forward_scratch(const ForwardParams&, const Launch&);
  static void forward(const ForwardParams&, const Launch&);
  static int64_t backward_scratch(const BackwardParams&, const Launch&);
  static void backward(const BackwardParams&, const Launch&);
};

int64_t scan_scratch(const ScanForwardParams&, const Launch&);
int64_t scan_scratch(const ScanBackwardParams&, const Launch&);
void scan_forward(const ScanForwardParams&, const Launch&);
void scan_backward(const ScanBackwardParams&, const Launch&);

int64_t conv_scratch(const ConvBackwardParams&);
void conv_forward(const ConvForwardParams&, const Launch&);
void conv_backward(const ConvBackwardParams&, const Launch&);

void conv_step(const ConvStepParams&, const Launch&);
template <typename Cell>
void mix_step(const MixStepParams&, const Launch&);

}  // namespace flashcell::cuda
