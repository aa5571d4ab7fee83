// The kernels' registration.h; ops of CUDA are registered for tensors of the CPU.
#pragma once
#include_next "registration.h"

#undef STABLE_TORCH_LIBRARY_IMPL_EXPAND
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(name, key, library) \
  STABLE_TORCH_LIBRARY_IMPL(name, CPU, library)
