// Bulk copies (sm_90): one instruction of one thread copies kilobytes to shared memory, through the
// async proxy, and an mbarrier counts the bytes as they arrive.
#pragma once
#include <cstdint>

#include "common/cuda/device.cuh"
#include "common/cuda/ptx/mbarrier.cuh"

namespace flashcell::cuda {

// Starts a copy of `bytes` bytes. The addresses and the size are multiples of 16.
template <typename Barrier>
DEVICE void bulk_copy([[maybe_unused]] uint32_t shared, [[maybe_unused]] const void* global,
                      [[maybe_unused]] int bytes, [[maybe_unused]] const Barrier& barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(mbarrier_address(barrier))
      : "memory");
#endif
}

// Orders this thread's accesses of global memory, and those it knows of, with bulk copies: a writer
// calls it after its stores, and a reader before its copies.
DEVICE void fence_proxy_async_global() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

}  // namespace flashcell::cuda
