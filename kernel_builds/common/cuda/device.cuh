// Defines DEVICE, the qualifiers of every function that kernels call, and says for which GPUs the
// code is that is being compiled.
#pragma once

#define DEVICE __device__ __forceinline__

namespace flashcell::cuda {

// Whether this is code for Turing (7.5). It has no asynchronous copies, no barriers in shared
// memory (mbarrier), and matrix instructions for fp16 only; a thread block has at most 64 KB of
// shared memory (kTuringSharedBytes in code.h). The wrappers in ptx/ say what they do instead.
// False on the host, which asks Code::is_turing().
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr bool kIsTuring = true;
#else
constexpr bool kIsTuring = false;
#endif

}  // namespace flashcell::cuda
