// setmaxnreg: moves registers from warps that need few to warps that need many. It needs sm_90a; on
// others every warp keeps the registers the kernel started with.
#pragma once
#include "common/cuda/device.cuh"

namespace flashcell::cuda {

// Sets the number of registers per thread; all warps of a warpgroup must call it together.
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
