// The kernels' registration.h; ops of CUDA are registered for tensors of the CPU.
#pragma once
#include_next "common/torch/registration.h"

#undef FLASHCELL_DEVICE
#define FLASHCELL_DEVICE CPU
