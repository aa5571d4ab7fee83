// Emulated functions of common/cuda/ptx/copy_async.cuh. That file describes what they do. Turing's
// are asynchronous here, too: what waits for them on other GPUs waits on Turing.
#pragma once
#include <cuda_runtime.h>

#include "common/cuda/device.cuh"
#include "common/cuda/ptx/shared_address.cuh"

namespace flashcell::cuda {

inline void copy_async(uint32_t shared, const void* global) {
  emulator::issue_copy({shared, global, 16});
}
inline void copy_async(void* shared, const void* global) {
  copy_async(shared_address(shared), global);
}
template <int kBytes>
void copy_or_zero(uint32_t shared, const void* global, bool copy) {
  emulator::issue_copy({shared, copy ? global : nullptr, kBytes});
}
inline void copy_async_or_zero(uint32_t shared, const void* global, bool copy) {
  copy_or_zero<16>(shared, global, copy);
}
inline void copy_word_or_zero(uint32_t shared, const void* global, bool copy) {
  copy_or_zero<4>(shared, global, copy);
}
inline void copy_word_or_zero(float* shared, const float* global, bool copy) {
  copy_word_or_zero(shared_address(shared), global, copy);
}
inline void copy_commit() { emulator::commit_copies(); }
template <int kPending>
void copy_wait() {
  emulator::wait_copies(kPending);
}

}  // namespace flashcell::cuda
