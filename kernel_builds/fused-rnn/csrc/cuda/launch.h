// Calls of the CUDA runtime, checked, and what an engine's source file instantiates.
#pragma once
#include <stdexcept>
#include <string>

namespace flashcell::cuda {
inline constexpr char kKernelName[] = "fused_rnn";
}

#include "common/cuda/check.cuh"

namespace flashcell::cuda {

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
