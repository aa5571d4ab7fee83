// Calls of the CUDA runtime, checked.
#pragma once
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace flashcell::cuda {

inline void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // the error is reported here: it must not surface again elsewhere
  throw std::runtime_error(std::string("fused_rnn: CUDA: ") + cudaGetErrorString(status));
}

// Both directions of an engine for a cell, in the 16-bit I/O types, or in every one.
#define FLASHCELL_INSTANTIATE_16(engine, Cell)                                       \
  template void forward_##engine<Cell, bf16>(const ForwardParams&, const Launch&);   \
  template void forward_##engine<Cell, fp16>(const ForwardParams&, const Launch&);   \
  template void backward_##engine<Cell, bf16>(const BackwardParams&, const Launch&); \
  template void backward_##engine<Cell, fp16>(const BackwardParams&, const Launch&);
#define FLASHCELL_INSTANTIATE(engine, Cell)                                         \
  FLASHCELL_INSTANTIATE_16(engine, Cell)                                            \
  template void forward_##engine<Cell, float>(const ForwardParams&, const Launch&); \
  template void backward_##engine<Cell, float>(const BackwardParams&, const Launch&);

}  // namespace flashcell::cuda
