// Barriers of some of a block's threads, barriers in shared memory that count bytes as well as
// threads, and stores between the thread blocks of a cluster, which such a barrier counts.
#pragma once
#include "tensor_core.cuh"

namespace flashcell::cuda {

template <int kCount>
DEVICE void barrier_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kCount) : "memory");
}
template <int kCount>
DEVICE void barrier_wait(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kCount) : "memory");
}

// The same where warps come from different places of the code: bar.sync would want one instruction.
template <int kCount>
DEVICE void barrier_meet(int id) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "n"(kCount) : "memory");
}

DEVICE void mbarrier_init(uint64_t& barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(count)
               : "memory");
}
DEVICE void mbarrier_arrive(uint64_t& barrier) {
  asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(
                   shared_address(&barrier))
               : "memory");
}
// When the thread's copies so far are there.
DEVICE void mbarrier_arrive_copied(uint64_t& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}
DEVICE void mbarrier_wait(uint64_t& barrier, unsigned parity) {
  asm volatile(
      "{\n .reg .pred done;\nwait:\n"
      " mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n @!done bra wait;\n}" ::"r"(
          shared_address(&barrier)),
      "r"(parity)
      : "memory");
}

// The one arrival of a phase, with the bytes that the phase waits for.
DEVICE void mbarrier_expect(uint64_t& barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(bytes)
               : "memory");
#endif
}

DEVICE void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
#endif
}

DEVICE int cluster_rank() {
  int rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}
DEVICE int cluster_size() {
  int size = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
#endif
  return size;
}

// Where the block `rank` of the cluster has what stands at `address` here.
DEVICE uint32_t address_in(uint32_t address, int rank) {
  uint32_t there = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
#endif
  return there;
}

// Stores into another block; its barrier counts the bytes when they are there.
DEVICE void send(uint32_t to, uint32_t barrier, uint32_t word) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
      "r"(word), "r"(barrier)
      : "memory");
#endif
}
DEVICE void send(uint32_t to, uint32_t barrier, const uint32_t (&words)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(barrier)
      : "memory");
#endif
}

}  // namespace flashcell::cuda
