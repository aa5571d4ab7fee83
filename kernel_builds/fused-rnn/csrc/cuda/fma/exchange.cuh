// The exchange of a cluster of the fma engine: values sent to the shared memory of other blocks,
// and a barrier of each block that counts what has arrived.
#pragma once
#include "common/cuda/ptx/cluster.cuh"
#include "common/cuda/ptx/mbarrier.cuh"
#include "plan.h"

namespace flashcell::cuda {

// Exchange n uses barrier n % 2. No block starts exchange n + 2 before all have received n. A block
// that works alone (not kCluster) has none.
template <bool kCluster>
class FmaExchange {
 public:
  // The first `arrivals` threads call arrive() in every exchange, in which this block receives
  // `values` floats. A barrier of the cluster must follow.
  DEVICE FmaExchange(const fma::Memory& m, float* memory, int arrivals, int values)
      : barriers_(shared_address(memory + m.barriers)), bytes_(values * int(sizeof(float))) {
    if constexpr (kCluster) {
      if (threadIdx.x > 0) return;
      for (int i = 0; i < 2; ++i) mbarrier_init(barriers_ + 8 * i, arrivals);
      mbarrier_init_fence();
    }
  }

  // The address in block `rank` of what has address `here` in this one.
  static DEVICE uint32_t there(const float* here, int rank) {
    return cluster_address(shared_address(here), rank);
  }
  DEVICE uint32_t barrier_of(int rank) const { return cluster_address(barriers_, rank); }
  static DEVICE void send(int n, uint32_t to, uint32_t barrier, float value) {
    store_async(to, barrier + n % 2 * 8, __float_as_uint(value));
  }
  DEVICE void arrive(int n) const {
    if (threadIdx.x == 0) {
      mbarrier_arrive_expect_tx(barriers_ + n % 2 * 8, bytes_);
    } else {
      mbarrier_arrive(barriers_ + n % 2 * 8);
    }
  }
  DEVICE void wait(int n) const { mbarrier_wait_cluster(barriers_ + n % 2 * 8, n / 2); }

 private:
  uint32_t barriers_;
  int bytes_;
};

}  // namespace flashcell::cuda
