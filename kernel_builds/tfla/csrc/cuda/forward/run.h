// Declares the forward pass on CUDA for one I/O type.
#pragma once
#include "../run.h"

namespace flashcell::cuda {

template <typename IO>
int64_t forward_scratch(const ForwardParams& p, const Device& device);
template <typename IO>
void run_forward(const ForwardParams& p, const Device& device, void* scratch, cudaStream_t stream);

}  // namespace flashcell::cuda
