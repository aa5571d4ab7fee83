// Checked launches, and the macros by which a source file instantiates an engine.
#pragma once
#include <stdexcept>
#include <string>

namespace flashcell::cuda {
inline constexpr char kKernelName[] = "fused_rnn";
}

#include "common/cuda/check.cuh"

namespace flashcell::cuda {

// Instantiates both directions of an engine for a cell, with 16-bit I/O types, fp32, or all of
// them; or the forward direction with 16-bit I/O types, or all of them.
#define FLASHCELL_INSTANTIATE_FORWARD(engine, Cell)                                \
  template void forward_##engine<Cell, bf16>(const ForwardParams&, const Launch&); \
  template void forward_##engine<Cell, fp16>(const ForwardParams&, const Launch&); \
  template void forward_##engine<Cell, float>(const ForwardParams&, const Launch&);
#define FLASHCELL_INSTANTIATE_16(engine, Cell)                                       \
  template void forward_##engine<Cell, bf16>(const ForwardParams&, const Launch&);   \
  template void forward_##engine<Cell, fp16>(const ForwardParams&, const Launch&);   \
  template void backward_##engine<Cell, bf16>(const BackwardParams&, const Launch&); \
  template void backward_##engine<Cell, fp16>(const BackwardParams&, const Launch&);
#define FLASHCELL_INSTANTIATE_32(engine, Cell)                                      \
  template void forward_##engine<Cell, float>(const ForwardParams&, const Launch&); \
  template void backward_##engine<Cell, float>(const BackwardParams&, const Launch&);
#define FLASHCELL_INSTANTIATE(engine, Cell) \
  FLASHCELL_INSTANTIATE_16(engine, Cell)    \
  FLASHCELL_INSTANTIATE_32(engine, Cell)

// Instantiates the backward direction alone.
#define FLASHCELL_INSTANTIATE_BACKWARD(engine, Cell)                                 \
  template void backward_##engine<Cell, bf16>(const BackwardParams&, const Launch&); \
  template void backward_##engine<Cell, fp16>(const BackwardParams&, const Launch&); \
  template void backward_##engine<Cell, float>(const BackwardParams&, const Launch&);

}  // namespace flashcell::cuda
