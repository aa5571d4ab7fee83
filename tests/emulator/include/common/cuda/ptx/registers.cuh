// The functions of common/cuda/ptx/registers.cuh: a thread of the emulator has what it needs.
#pragma once

namespace flashcell::cuda {

template <int>
void setmaxnreg_inc() {}
template <int>
void setmaxnreg_dec() {}

}  // namespace flashcell::cuda
