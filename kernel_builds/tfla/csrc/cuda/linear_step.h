// Linear layers of one token a row on CUDA, in 16 bits.
#pragma once
#include "run.h"

namespace flashcell::cuda {

template <typename IO>
void run_linear_step(const LinearStepParams& p, const Device& device, cudaStream_t stream);

}  // namespace flashcell::cuda
