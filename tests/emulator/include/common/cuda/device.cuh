// common/cuda/device.cuh for the emulator: emulate.py says for which GPUs the code is compiled.
#pragma once

#define DEVICE __device__ __forceinline__

namespace flashcell::cuda {

#if defined(EMULATES_TURING)
constexpr bool kIsTuring = true;
#else
constexpr bool kIsTuring = false;
#endif

}  // namespace flashcell::cuda
