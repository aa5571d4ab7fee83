// Programmatic dependent launch: a kernel may start while the kernel before it in the stream is
// still running (Grid::pdl in launch.cuh).
#pragma once
#include <cuda_runtime.h>

#include "common/cuda/device.cuh"

namespace flashcell::cuda {

// pdl_wait waits until the kernel before this one has completed; pdl_launch_dependents lets the
// kernel after this one start.
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
