// A thread block of three warpgroups on Hopper: the first copies into a ring of slots in shared
// memory, the other two multiply what is there. Both go through the slots in the same order.
#pragma once
#include "mbarrier.cuh"
#include "wgmma.cuh"

namespace flashcell::cuda {

constexpr int kConsumers = 2, kRingThreads = (1 + kConsumers) * kWarpgroup;
// Registers of their threads; the kernel starts with 168, which is what the block has room for.
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;

// Which warpgroup the thread is of: the compiler sees that it is one for all threads of a warp.
DEVICE int warpgroup() { return __shfl_sync(~0u, int(threadIdx.x) / kWarpgroup, 0); }

// Two barriers: a slot is full when the producer's warps have arrived, empty when all consumers'
// have. `round` counts how often it was used before.
struct Slot {
  uint32_t full;
  DEVICE uint32_t empty() const { return full + 8; }
  static constexpr int kBytes = 16;

  DEVICE void init() const {
    barrier_init(full, kWarpgroup / 32);
    barrier_init(empty(), kConsumers * kWarpgroup / 32);
  }
  // Of a consumer. The fence is here and not with the producer, where it would wait for all copies
  // that are under way.
  DEVICE void wait_full(int round) const {
    barrier_wait(full, round);
    fence_for_wgmma();
  }
  // Of a consumer: its warp will not read the slot any more.
  DEVICE void release() const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty());
  }
};

// Where a warpgroup is in a ring of `count` slots of kBytes.
template <int kBytes>
struct Ring {
  uint32_t memory, barriers;
  int count, index = 0, round = 0;

  DEVICE Ring(uint32_t memory, uint32_t barriers, int count)
      : memory(memory), barriers(barriers), count(count) {}

  DEVICE void init() const {  // by one thread
    for (int i = 0; i < count; ++i) Slot{barriers + i * Slot::kBytes}.init();
  }
  DEVICE Slot slot() const { return {barriers + index * Slot::kBytes}; }
  DEVICE uint32_t address() const { return memory + index * kBytes; }
  DEVICE void advance() {
    if (++index == count) index = 0, ++round;
  }
};

// The producer's copies in flight, to kInFlight slots at most: each is told full when it has landed.
template <int kInFlight>
struct Landing {
  uint32_t full[kInFlight] = {};

  // Until consumers have left the slot. They may wait for what is in flight.
  DEVICE void wait_empty(Slot slot, int round) {
    const bool is_empty = barrier_is_over(slot.empty(), round - 1);
    if (__ballot_sync(~0u, is_empty) == ~0u) return;
    finish();
    barrier_wait(slot.empty(), round - 1);
  }
  // After the copies to a slot.
  DEVICE void add(Slot slot) {
    copy_commit();
    copy_wait<kInFlight>();
    tell(full[0]);
#pragma unroll
    for (int i = 1; i < kInFlight; ++i) full[i - 1] = full[i];
    full[kInFlight - 1] = slot.full;
  }
  DEVICE void finish() {
    copy_wait<0>();
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) tell(full[i]), full[i] = 0;
  }

 private:
  DEVICE static void tell(uint32_t barrier) {
    if (barrier == 0) return;
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
  }
};

}  // namespace flashcell::cuda
