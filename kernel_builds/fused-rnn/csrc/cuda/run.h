// Declares the CUDA entry points that ops.cpp calls; it needs no CUDA headers.
#pragma once
#include "../stack/params.h"
#include "engine.h"

namespace flashcell::cuda {

Device current_device();             // throws if the library has no code for the GPU
[[noreturn]] void refuse_cluster();  // for GPUs that have clusters while the code they run does not
bool is_recording(cudaStream_t stream);  // whether the caller records a CUDA graph

// Runs the engine that launch.engine names; `cell` is the index in AllCells. T may be 0.
int64_t forward_scratch(int cell, const ForwardParams&, Dtype, const Launch&);
int64_t backward_scratch(int cell, const BackwardParams&, Dtype, const Launch&);
void forward(int cell, const ForwardParams&, Dtype, const Launch&);
void backward(int cell, const BackwardParams&, Dtype, const Launch&);

// out[i] = sum over the tiles, in a fixed order, of partial[tile][i]
void reduce_bias(const float* partial, int64_t tiles, int64_t count, float* out,
                 cudaStream_t stream);

struct DweightParams {
  int64_t rows, G, N, D;  // rows = B T
  const void* dr;         // [rows, G, row_heads, D] io
  const void* h_prev;     // [rows, row_heads, D] io
  void* dweight;          // [G, N, D, D] io
  void* scratch;          // dweight_scratch bytes
  int64_t row_heads;      // N, or more if the rows have other heads behind these
  int64_t shift;          // rows from the first row of a head to that of the next
};
int64_t dweight_scratch(const DweightParams&, Dtype, const Launch&);
void recurrent_dweight(const DweightParams&, Dtype, const Launch&);

void copy_all(const Copy* copies, int64_t count, cudaStream_t stream);  // no float64

// Writes the arrays of PackedRows and the table of the sequences, [B], for engines that have T rows
// a sequence, from T batch sizes on the host, which a kernel takes as parameters; `stride` is that
// between rows of x.
void write_packed_rows(const int64_t* batch_sizes, int64_t T, const PackedRows& rows,
                       Sequence* table, int64_t stride, cudaStream_t stream);

}  // namespace flashcell::cuda
