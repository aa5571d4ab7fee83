// setmaxnreg: registers go from warps that need few to warps that need many. sm_90a; elsewhere
// every warp keeps what the kernel started with.
#pragma once
#include "common/cuda/device.cuh"

namespace flashcell::cuda {

// Registers of a thread from here on; all warps of a warpgroup ask at once.
template <int kRegisters>
DEVICE void setmaxnreg_inc() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
DEVICE void setmaxnreg_dec() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

}  // namespace flashcell::cuda
