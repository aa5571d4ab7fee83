// What an engine is: one function for each direction, instantiated for every cell and I/O type in
// its own source file. Nothing here waits for the device or allocates; errors throw.
#pragma once
#include "../params.h"
#include "common/cuda/code.h"

using cudaStream_t = struct CUstream_st*;  // as CUDA declares it: ops.cpp needs no CUDA headers

namespace flashcell::cuda {

enum class Engine { kBlock, kCluster, kGrid, kStep };

struct Device {  // what the plan needs to know of a GPU
  int arch;      // 90 for compute capability 9.0
  Code code;     // that runs there
  int sms;
  int shared_bytes;  // a block may ask for
};

struct CellSizes {  // what the plan needs to know of a cell
  int gates, states, bias_rows, saved;
  bool splits_gradient;  // dr differs from dx
};
template <typename Cell>
constexpr CellSizes kSizesOf = {Cell::kGates, Cell::kStates, Cell::kBias, Cell::kSaved,
                                Cell::kSplitGrad};

struct Launch {
  Device device;
  cudaStream_t stream;
  bool tf32;      // fp32 products may round their operands to tf32
  Engine engine;  // that was chosen
  int tile;       // sequences that share a row of dbias_partial: 8, or 4
  void* scratch;  // forward: as many bytes as forward_scratch asked for
};

// One thread block runs whole sequences of a head: the weight of the head fits its registers.
template <typename Cell, typename IO>
void forward_block(const ForwardParams&, const Launch&);
template <typename Cell, typename IO>
void backward_block(const BackwardParams&, const Launch&);

// A cluster of thread blocks runs whole sequences of a head: each keeps the weight of 32 units and
// sends to the others after every step. 16-bit I/O only.
template <typename Cell, typename IO>
void forward_cluster(const ForwardParams&, const Launch&);
template <typename Cell, typename IO>
void backward_cluster(const BackwardParams&, const Launch&);

// All thread blocks of the GPU run at once; each keeps 16 or 24 units of a head and exchanges h
// (backward: dr) through L2 after every step.
template <typename Cell, typename IO>
void forward_grid(const ForwardParams&, const Launch&);
template <typename Cell, typename IO>
void backward_grid(const BackwardParams&, const Launch&);

// One launch per step, for whatever else there is: any width, any strides, exact fp32.
template <typename Cell, typename IO>
void forward_step(const ForwardParams&, const Launch&);
template <typename Cell, typename IO>
void backward_step(const BackwardParams&, const Launch&);

}  // namespace flashcell::cuda
