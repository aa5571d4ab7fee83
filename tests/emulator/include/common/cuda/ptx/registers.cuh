// Emulated functions of common/cuda/ptx/registers.cuh: they do nothing, because an emulated thread
// is not limited in registers.
#pragma once

namespace flashcell::cuda {

template <int>
void setmaxnreg_inc() {}
template <int>
void setmaxnreg_dec() {}

}  // namespace flashcell::cuda
