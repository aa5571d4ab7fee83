// mbarrier: barriers in shared memory, which count the threads that arrive and the bytes that come.
// A barrier turns to its next phase when all that it expects have arrived; phases count from 0.
#pragma once
#include <cstdint>

#include "common/cuda/device.cuh"
#include "common/cuda/ptx/shared_address.cuh"

namespace flashcell::cuda {

// A barrier is 8 bytes of shared memory. The functions take its address, or the variable that it
// is.
DEVICE uint32_t mbarrier_address(uint32_t address) { return address; }
DEVICE uint32_t mbarrier_address(const uint64_t& variable) { return shared_address(&variable); }

template <typename Barrier>
DEVICE void mbarrier_init(const Barrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(mbarrier_address(barrier)), "r"(arrivals)
               : "memory");
}
template <typename Barrier>
DEVICE void mbarrier_arrive(const Barrier& barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(mbarrier_address(barrier)) : "memory");
}
// Arrives once this thread's cp.async so far have landed; it goes on at once. `arrivals` counts it.
template <typename Barrier>
DEVICE void mbarrier_arrive_after_copies(const Barrier& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(mbarrier_address(barrier))
               : "memory");
}
// Waits until the phase of this parity is over, polling: sm_80 has no other way.
template <typename Barrier>
DEVICE void mbarrier_poll(const Barrier& barrier, unsigned parity) {
  asm volatile(
      "{\n .reg .pred done;\nwait:\n"
      " mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n @!done bra wait;\n}" ::"r"(
          mbarrier_address(barrier)),
      "r"(parity)
      : "memory");
}

// What follows takes sm_90.

// After all inits, before the barrier that shows them to other threads.
DEVICE void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives, and makes the phase wait for `bytes` as well.
template <typename Barrier>
DEVICE void mbarrier_arrive_expect_tx(const Barrier& barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(mbarrier_address(barrier)),
               "r"(bytes)
               : "memory");
#endif
}
// Waits until phase `phase` is over, suspended: no earlier than the last phase but one.
template <typename Barrier>
DEVICE void mbarrier_wait(const Barrier& barrier, int phase) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@done bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(mbarrier_address(barrier)),
      "r"(phase & 1)
      : "memory");
}
// The same for a barrier that counts stores of other blocks of the cluster.
template <typename Barrier>
DEVICE void mbarrier_wait_cluster(const Barrier& barrier, int phase) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(mbarrier_address(barrier)),
      "r"(phase & 1)
      : "memory");
}

}  // namespace flashcell::cuda
