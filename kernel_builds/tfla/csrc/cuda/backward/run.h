// Declares the backward pass on CUDA for one I/O type.
#pragma once
#include "../run.h"

namespace flashcell::cuda {

template <typename IO>
int64_t backward_scratch(const BackwardParams& p, const Device& device);
template <typename IO>
void run_backward(const BackwardParams& p, const Device& device, void* scratch,
                  cudaStream_t stream);

}  // namespace flashcell::cuda
