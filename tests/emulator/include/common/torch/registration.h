// Replaces the kernels' registration.h: the CUDA ops are registered for CPU tensors.
#pragma once
#include_next "common/torch/registration.h"

#undef FLASHCELL_DEVICE
#define FLASHCELL_DEVICE CPU
