// Thread block clusters (sm_90): rank, size, barriers, and access to the shared memory of other
// blocks of the cluster. On older GPUs these functions do nothing, and the planners never choose a
// cluster.
#pragma once
#include <cstdint>

#include "common/cuda/device.cuh"

namespace flashcell::cuda {

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

// The barrier over all threads of a cluster, split in two: writes made before cluster_arrive are
// visible after cluster_wait. All threads of a warp must call it together.
DEVICE void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
DEVICE void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
DEVICE void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// The same barrier for warps whose threads may arrive one by one.
DEVICE void cluster_arrive_diverged() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
// Orders no memory accesses; the releasing form waits for outstanding stores.
DEVICE void cluster_arrive_relaxed_diverged() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
DEVICE void cluster_wait_diverged() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Maps a shared memory address of this block to the same location in block `rank` (mapa).
DEVICE uint32_t cluster_address([[maybe_unused]] uint32_t address, [[maybe_unused]] int rank) {
  uint32_t there = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
#endif
  return there;
}

// Loads from an address returned by cluster_address.
DEVICE float4 load_cluster([[maybe_unused]] uint32_t address) {
  float4 v = {};
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
#endif
  return v;
}

// Stores asynchronously to an address returned by cluster_address. The mbarrier in the target block
// counts the bytes as they arrive.
DEVICE void store_async([[maybe_unused]] uint32_t to, [[maybe_unused]] uint32_t barrier,
                        [[maybe_unused]] uint32_t word) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
      "r"(word), "r"(barrier)
      : "memory");
#endif
}
DEVICE void store_async([[maybe_unused]] uint32_t to, [[maybe_unused]] uint32_t barrier,
                        [[maybe_unused]] float2 value) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          to),
      "f"(value.x), "f"(value.y), "r"(barrier)
      : "memory");
#endif
}
DEVICE void store_async([[maybe_unused]] uint32_t to, [[maybe_unused]] uint32_t barrier,
                        [[maybe_unused]] const uint32_t (&words)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(barrier)
      : "memory");
#endif
}

}  // namespace flashcell::cuda
