// What ops.cpp calls: the door to CUDA, without its headers.
#pragma once
#include "engine.h"

namespace flashcell::cuda {

Device describe(int index);

void set_zero(void* to, int64_t bytes, cudaStream_t stream);

}  // namespace flashcell::cuda
