// Declares the decoding step on CUDA for one I/O type.
#pragma once
#include "../run.h"

namespace flashcell::cuda {

int64_t step_scratch(const StepParams& p);
template <typename IO>
void run_step(const StepParams& p, const Device& device, void* scratch, cudaStream_t stream);
template <typename IO>  // of a step with a ring
void run_replay(const StepParams& p, const Device& device, void* scratch, cudaStream_t stream);

}  // namespace flashcell::cuda
