// Emulated functions of common/cuda/ptx/named_barrier.cuh.
#pragma once
#include "common/cuda/device.cuh"

namespace flashcell::cuda {

template <int kThreads>
inline void named_barrier_arrive(int id) {
  emulator::arrive(id, kThreads);
}
template <int kThreads>
inline void named_barrier_sync(int id) {
  emulator::barrier(id, kThreads);
}

}  // namespace flashcell::cuda
