// The CUDA entry points that ops.cpp calls; needs no CUDA headers.
#pragma once
#include "engine.h"

namespace flashcell::cuda {

Device current_device();  // an error where the library has no code for it

void set_zero(void* to, int64_t bytes, cudaStream_t stream);

}  // namespace flashcell::cuda
