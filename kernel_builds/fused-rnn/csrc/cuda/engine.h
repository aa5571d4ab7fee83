// Declares the engines: for each, one function per direction, instantiated for every cell and I/O
// type in its own source file. None of them waits for the device or allocates; errors throw.
#pragma once
#include "../cells/reads_h.h"
#include "../params.h"
#include "common/cuda/code.h"

// Declared as in CUDA's headers, so that ops.cpp need not include them.
using cudaStream_t = struct CUstream_st*;

namespace flashcell::cuda {

enum class Engine { kBlock, kCluster, kGrid, kStep, kGemm, kFma, kBatch, kWide };
constexpr const char* kEngineNames[] = {"block", "cluster", "grid",  "step",
                                        "gemm",  "fma",     "batch", "wide"};
constexpr int kEngineCount = 8;

struct Device {  // the properties of a GPU that the planner reads
  int arch;      // 90 for compute capability 9.0
  Code code;     // describes the code object that runs on the GPU
  int sms;
  int shared_bytes;  // shared memory that a thread block of this code may use
};

// Whether fp32 products may round their operands to tf32: code for Turing has no such instruction.
constexpr bool has_tf32(const Device& device) { return !device.code.is_turing(); }
// The same for products of cuBLAS, whose code is not this library's.
constexpr bool has_blas_tf32(const Device& device) { return device.arch >= 80; }

// The row of a cell of 4, 3 or 1 gates in a table of costs.
constexpr int cost_row(int gates) { return gates == 4 ? 0 : gates == 3 ? 1 : 2; }

struct CellSizes {  // the sizes of a cell that the planner reads
  int gates, states, bias_rows, saved;
  bool splits_gradient;  // dr differs from dx
  bool reads_h;          // a step reads h of the step before, apart from the product
};
template <typename Cell>
constexpr CellSizes kSizesOf = {Cell::kGates, Cell::kStates,    Cell::kBias,
                                Cell::kSaved, Cell::kSplitGrad, kReadsH<Cell>};

struct Launch {
  Device device;
  cudaStream_t stream;
  bool tf32;      // fp32 products may round their operands to tf32
  Engine engine;  // the engine chosen by the planner
  int tile;       // sequences that share a row of dbias_partial
  void* scratch;  // as many bytes as forward_scratch or backward_scratch returned
  void* blas;     // torch's cuBLAS handle, for the gemm engine
};

// The block engine: one thread block runs whole sequences of a head, whose weight fits in its
// registers.
template <typename Cell, typename IO>
void forward_block(const ForwardParams&, const Launch&);
template <typename Cell, typename IO>
void backward_block(const BackwardParams&, const Launch&);

// The cluster engine: a cluster of thread blocks runs whole sequences of a head. Each block keeps
// the weight of 32 units and sends to the others after every step. 16-bit I/O only.
template <typename Cell, typename IO>
void forward_cluster(const ForwardParams&, const Launch&);
template <typename Cell, typename IO>
void backward_cluster(const BackwardParams&, const Launch&);

// The grid engine: all thread blocks run at once. Each keeps the weight of 16 or 24 units of a
// head, and they exchange h (backward: dr) through L2 after every step. Not in code for Turing.
template <typename Cell, typename IO>
void forward_grid(const ForwardParams&, const Launch&);
template <typename Cell, typename IO>
void backward_grid(const BackwardParams&, const Launch&);

// The step engine: one launch per step, for everything else: any width, any strides, exact fp32.
template <typename Cell, typename IO>
void forward_step(const ForwardParams&, const Launch&);
template <typename Cell, typename IO>
void backward_step(const BackwardParams&, const Launch&);

// The gemm engine: a matrix product and a kernel for the cells, every step. Large batches, and
// exact fp32.
template <typename Cell, typename IO>
void forward_gemm(const ForwardParams&, const Launch&);
template <typename Cell, typename IO>
void backward_gemm(const BackwardParams&, const Launch&);

// The backward pass of every engine if grad_clip is 0 and no state is clipped: nothing is
// multiplied by the weight, and one launch runs all steps. Of any width.
constexpr int kCutTile = 8;  // sequences that share a row of dbias_partial
inline bool is_cut(const BackwardParams& p) { return p.grad_clip == 0 && p.bound == 0; }
template <typename Cell, typename IO>
void backward_cut(const BackwardParams&, const Launch&);

// The fma engine: a thread block, or a cluster for wider heads, runs whole sequences of a head in
// exact fp32, with the weight in registers. fp32 I/O only.
template <typename Cell, typename IO>
void forward_fma(const ForwardParams&, const Launch&);
template <typename Cell, typename IO>
void backward_fma(const BackwardParams&, const Launch&);

// The wide engine: all thread blocks run at once, in exact fp32. Each keeps the weight of some
// units of a head of more than 256 units in shared memory, and they exchange h (backward: dr)
// through L2 after every step. fp32 I/O only, in code for 9.0a.
template <typename Cell, typename IO>
void forward_wide(const ForwardParams&, const Launch&);
template <typename Cell, typename IO>
void backward_wide(const BackwardParams&, const Launch&);

// The batch engine: thread blocks compute the products of large tiles of sequences and units with
// wgmma, and their cells, and exchange h through L2 after every step. 16-bit I/O and TF32, on
// sm_90a, and the forward pass only: another engine runs the backward pass.
template <typename Cell, typename IO>
void forward_batch(const ForwardParams&, const Launch&);

}  // namespace flashcell::cuda
