// Named barriers: barriers of some warps of a thread block, which has 16 of them. 0 is
// __syncthreads.
#pragma once
#include "common/cuda/device.cuh"

namespace flashcell::cuda {

// One of kThreads threads has come; it goes on at once.
template <int kThreads>
DEVICE void named_barrier_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
// Waits for kThreads threads, this one among them.
template <int kThreads>
DEVICE void named_barrier_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
// The same where warps come from different places of the code: bar.sync would want one instruction.
template <int kThreads>
DEVICE void named_barrier_sync_diverged(int id) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

}  // namespace flashcell::cuda
