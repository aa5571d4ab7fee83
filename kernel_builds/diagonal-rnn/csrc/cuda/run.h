// Declares the CUDA entry points that ops.cpp calls; it needs no CUDA headers.
#pragma once
#include "engine.h"

namespace flashcell::cuda {

Device current_device();  // throws if the library has no code for the GPU

void set_zero(void* to, int64_t bytes, cudaStream_t stream);

}  // namespace flashcell::cuda
