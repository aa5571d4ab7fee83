// Declares the engines that run.cu calls: one function for each direction, instantiated for every
// cell in its own source file. None of them waits for the device or allocates; errors throw.
#pragma once
#include "../params.h"
#include "common/cuda/code.h"

// Declared as in CUDA's headers, so that ops.cpp need not include them.
using cudaStream_t = struct CUstream_st*;

namespace flashcell::cuda {

struct Device {  // the properties of a GPU that the planner reads
  int arch;      // 90 for compute capability 9.0
  Code code;     // describes the code object that runs on the GPU
  int sms;
};

struct Launch {
  Device device;
  cudaStream_t stream;
  Dtype dtype;
  int together;   // how many neighbouring channels can be loaded as one word: 1, 2, 4 or 8
  void* scratch;  // as many bytes as the engine's scratch function returned
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
