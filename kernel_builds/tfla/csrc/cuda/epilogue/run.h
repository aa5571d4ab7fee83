// Declares the epilogue (norm, weight and output gate) on CUDA for one I/O type.
#pragma once
#include "../run.h"

namespace flashcell::cuda {

int64_t epilogue_scratch(const EpilogueBackwardParams& p);
template <typename IO>
void run_epilogue(const EpilogueParams& p, cudaStream_t stream);
template <typename IO>
void run_epilogue(const EpilogueBackwardParams& p, void* scratch, cudaStream_t stream);

}  // namespace flashcell::cuda
