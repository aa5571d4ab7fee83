// Describes the code object that runs on a GPU by what it was compiled for. A driver can compile
// PTX for a newer GPU, but the preprocessor has run before that: code for 8.0 contains nothing
// inside `#if __CUDA_ARCH__ >= 900`, on whatever GPU it runs. Engines are therefore chosen by this,
// not by the GPU's compute capability.
#pragma once

namespace flashcell::cuda {

struct Code {
  int arch = 0;         // __CUDA_ARCH__ / 10, for example 90 for compute capability 9.0
  bool sm_90a = false;  // compiled for 9.0a, so it has the instructions that only 9.0a has

  constexpr bool is_turing() const { return arch < 80; }
};

// Returns the shared memory that a thread block may use, for a GPU that has `of_gpu` bytes. Code
// for 7.5 uses no more than a Turing GPU has, on newer GPUs too: other kernels are not compiled for
// it.
constexpr int kTuringSharedBytes = 64 << 10;
constexpr int usable_shared_bytes(const Code& code, int of_gpu) {
  return code.is_turing() && of_gpu > kTuringSharedBytes ? kTuringSharedBytes : of_gpu;
}

}  // namespace flashcell::cuda
