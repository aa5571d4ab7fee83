// What the kernels that run on a GPU were compiled for. A driver compiles PTX for a newer GPU, but
// the preprocessor has decided before: code for 8.0 has nothing of `#if __CUDA_ARCH__ >= 900`, on
// any GPU. An engine is offered by this, not by the compute capability of the GPU.
#pragma once

namespace flashcell::cuda {

struct Code {
  int arch = 0;         // 90 for compute capability 9.0: __CUDA_ARCH__ / 10
  bool sm_90a = false;  // has the instructions of 9.0 alone: compiled for 9.0a
};

}  // namespace flashcell::cuda
