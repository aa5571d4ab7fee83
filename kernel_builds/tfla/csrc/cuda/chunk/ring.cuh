// The structure of Hopper's thread blocks: three warpgroups, of which the first (the producer)
// copies into a ring of slots in shared memory, and the other two (the consumers) multiply from
// there. Both go through the slots in the same order.
#pragma once
#include "common/cuda/ptx/mbarrier.cuh"
#include "common/cuda/ptx/registers.cuh"
#include "common/cuda/ptx/wgmma.cuh"

namespace flashcell::cuda {

constexpr int kConsumers = 2, kRingThreads = (1 + kConsumers) * kWarpgroup;
// Registers per thread of each kind. The kernel starts with 168, the most that the block can have.
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;

// Returns the thread's warpgroup; the shuffle tells the compiler that it is the same for a whole
// warp.
DEVICE int warpgroup() { return __shfl_sync(~0u, int(threadIdx.x) / kWarpgroup, 0); }

// The two barriers of a slot. It is full when the copies of all producer threads have landed, and
// empty when all consumer warps have released it. `round` is how often the slot was used before.
struct Slot {
  uint32_t full;
  DEVICE uint32_t empty() const { return full + 8; }
  static constexpr int kBytes = 16;

  DEVICE void init(int arrivals = kWarpgroup) const {
    mbarrier_init(full, arrivals);
    mbarrier_init(empty(), kConsumers * kWarpgroup / 32);
  }
  // For the producer: waits until it may copy to the slot; reports that it has started its copies.
  DEVICE void wait_empty(int round) const { mbarrier_wait(empty(), round - 1); }
  DEVICE void fill() const { mbarrier_arrive_after_copies(full); }
  // For a consumer: waits until it may read the slot, by wgmma too; reports that its warp has
  // finished.
  DEVICE void wait_full(int round) const {
    mbarrier_wait(full, round);
    fence_proxy_async();
  }
  DEVICE void release() const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty());
  }
};

// A warpgroup's position in a ring of `count` slots of kBytes.
template <int kBytes>
struct Ring {
  uint32_t memory, barriers;
  int count, index = 0, round = 0;

  DEVICE Ring(uint32_t memory, uint32_t barriers, int count)
      : memory(memory), barriers(barriers), count(count) {}

  DEVICE void init() const {  // called by one thread
    for (int i = 0; i < count; ++i) Slot{barriers + i * Slot::kBytes}.init();
  }
  DEVICE Slot slot() const { return {barriers + index * Slot::kBytes}; }
  DEVICE uint32_t address() const { return memory + index * kBytes; }
  DEVICE void advance() {
    if (++index == count) index = 0, ++round;
  }
};

// Passes the numbers of the next items from the producer's first thread to all threads of the
// block.
struct ItemQueue {
  static constexpr int kAhead = 2;

  int* items;
  uint32_t barriers;
  int index = 0, round = 0;

  DEVICE Slot slot() const { return {barriers + index * Slot::kBytes}; }
  DEVICE void init() const {
    for (int i = 0; i < kAhead; ++i) {
      const Slot slot{barriers + i * Slot::kBytes};
      mbarrier_init(slot.full, 1), mbarrier_init(slot.empty(), kRingThreads);
    }
  }
  DEVICE void put(int item) const {
    slot().wait_empty(round);
    items[index] = item;
    mbarrier_arrive(slot().full);
  }
  DEVICE int take() {
    mbarrier_wait(slot().full, round);
    const int item = items[index];
    mbarrier_arrive(slot().empty());  // all lanes arrive, because each has read the number itself
    if (++index == kAhead) index = 0, ++round;
    return item;
  }
};

}  // namespace flashcell::cuda
