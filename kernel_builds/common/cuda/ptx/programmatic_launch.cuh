// Programmatic dependent launch: a kernel starts while the one ahead of it ends (Grid::pdl of
// launch.cuh).
#pragma once
#include <cuda_runtime.h>

#include "common/cuda/device.cuh"

namespace flashcell::cuda {

// What was launched before this kernel has ended; what is launched after it may start.
DEVICE void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace flashcell::cuda
