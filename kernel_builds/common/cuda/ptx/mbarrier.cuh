// mbarrier: barriers in shared memory that count arriving threads and arriving bytes. A barrier
// advances to its next phase when all expected threads and bytes have arrived; phases count from 0.
#pragma once
#include <cstdint>

#include "common/cuda/device.cuh"
#include "common/cuda/ptx/shared_address.cuh"

namespace flashcell::cuda {

// A barrier is 8 bytes of shared memory. The functions below take its shared memory address or the
// uint64_t variable itself.
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
// Makes the barrier count one arrival when all earlier cp.async of this thread have landed, without
// waiting for them. The count given to mbarrier_init includes this arrival.
template <typename Barrier>
DEVICE void mbarrier_arrive_after_copies(const Barrier& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(mbarrier_address(barrier))
               : "memory");
}
// Waits by polling until the phase of this parity has completed; sm_80 has no suspending wait.
template <typename Barrier>
DEVICE void mbarrier_poll(const Barrier& barrier, unsigned parity) {
  asm volatile(
      "{\n .reg .pred done;\nwait:\n"
      " mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n @!done bra wait;\n}" ::"r"(
          mbarrier_address(barrier)),
      "r"(parity)
      : "memory");
}

// The functions below need sm_90.

// Call it after initialising all barriers and before the block or cluster barrier that makes them
// visible to other threads.
DEVICE void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives, and makes the current phase wait for `bytes` more bytes.
template <typename Barrier>
DEVICE void mbarrier_arrive_expect_tx(const Barrier& barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(mbarrier_address(barrier)),
               "r"(bytes)
               : "memory");
#endif
}
// Waits, suspended, until phase `phase` has completed. The barrier must not be more than one phase
// ahead of it.
template <typename Barrier>
DEVICE void mbarrier_wait(const Barrier& barrier, int phase) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@done bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(mbarrier_address(barrier)),
      "r"(phase & 1)
      : "memory");
}
// The same for a barrier that counts stores from other blocks of the cluster.
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
