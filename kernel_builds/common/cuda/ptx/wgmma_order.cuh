// Fences around Hopper's asynchronous matrix instruction wgmma, and waits for it.
#pragma once
#include <cstdint>

#include "common/cuda/device.cuh"

namespace flashcell::cuda {

// Makes shared memory as this thread sees it (its own stores, and those it has seen through a
// barrier) visible to later wgmma. A thread with copies in flight would wait for them here.
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Keeps the compiler from moving any use of these registers across this point.
template <int kN>
DEVICE void pin(float (&sums)[kN][4]) {
#pragma unroll
  for (int j = 0; j < kN; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(sums[j][e])::"memory");
  }
}
template <int kN>
DEVICE void pin(uint32_t (&words)[kN][4]) {
#pragma unroll
  for (int j = 0; j < kN; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+r"(words[j][e])::"memory");
  }
}

// Call it with all registers of a product before the first wgmma, if anything else has written
// them.
template <typename... Registers>
DEVICE void wgmma_fence(Registers&... registers) {
  (pin(registers), ...);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `kPending` groups are still running; `registers` may be used again
// afterwards.
template <int kPending, typename... Registers>
DEVICE void wgmma_wait(Registers&... registers) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
  (pin(registers), ...);
}

}  // namespace flashcell::cuda
