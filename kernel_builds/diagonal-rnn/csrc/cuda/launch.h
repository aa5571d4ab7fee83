// Calls of the CUDA runtime, checked, and launches, by this kernel's name.
#pragma once

namespace flashcell::cuda {

inline constexpr char kKernelName[] = "diagonal_rnn";

}  // namespace flashcell::cuda

#include "common/cuda/launch.cuh"
