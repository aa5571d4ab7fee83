// Checked CUDA calls and launches, with this kernel's name in error messages.
#pragma once

namespace flashcell::cuda {

inline constexpr char kKernelName[] = "diagonal_rnn";

}  // namespace flashcell::cuda

#include "common/cuda/launch.cuh"
