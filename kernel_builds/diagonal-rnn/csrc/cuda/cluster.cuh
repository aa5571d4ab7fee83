// What the blocks of a cluster tell each other with, sm_90: barriers in shared memory that count
// bytes as well as threads, and stores into another block that such a barrier counts.
#pragma once
#include <cstdint>

#include "common/cuda/device.cuh"

namespace flashcell::cuda {

DEVICE uint32_t shared_address(const void* shared) {
  return uint32_t(__cvta_generic_to_shared(shared));
}

// A barrier turns to its next phase when all that it expects have arrived; phases count from 0.
DEVICE void barrier_init(uint64_t& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals)
               : "memory");
}
DEVICE void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEVICE void barrier_arrive(uint64_t& barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
DEVICE void barrier_expect(uint64_t& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(bytes)
               : "memory");
}
// Until phase `phase` is over: no earlier than the last one but one.
DEVICE void barrier_wait(uint64_t& barrier, int phase) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@done bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(shared_address(&barrier)),
      "r"(phase & 1)
      : "memory");
}

// The same for a barrier that stores of other blocks count.
DEVICE void barrier_wait_for_others(uint64_t& barrier, int phase) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(shared_address(&barrier)),
      "r"(phase & 1)
      : "memory");
}

DEVICE uint32_t block_in_cluster() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
DEVICE uint32_t blocks_of_cluster() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
DEVICE uint32_t address_in_block(uint32_t shared, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}
// A store into any block of a cluster of several, counted by a barrier there.
DEVICE void tell(uint32_t to, float2 value, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          to),
      "f"(value.x), "f"(value.y), "r"(barrier)
      : "memory");
}

}  // namespace flashcell::cuda
