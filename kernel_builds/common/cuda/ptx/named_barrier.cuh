// Named barriers: barriers among some of the warps of a thread block. There are 16, and number 0 is
// the one of __syncthreads.
#pragma once
#include "common/cuda/device.cuh"

namespace flashcell::cuda {

// Arrives at a barrier of kThreads threads without waiting.
template <int kThreads>
DEVICE void named_barrier_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
// Arrives at a barrier of kThreads threads and waits for the others.
template <int kThreads>
DEVICE void named_barrier_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
// The same where the threads of a warp reach the barrier at different instructions; bar.sync
// requires those of a warp to execute the same one.
template <int kThreads>
DEVICE void named_barrier_sync_diverged(int id) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

}  // namespace flashcell::cuda
