// Emulated functions of common/cuda/ptx/mbarrier.cuh, those that the emulated kernels call.
#pragma once
#include "common/cuda/ptx/shared_address.cuh"

namespace flashcell::cuda {

struct Mbarrier {  // a barrier in shared memory
  uint16_t expects, arrived;
  uint32_t phase;
};
inline Mbarrier& mbarrier_at(uint32_t barrier) {
  return *reinterpret_cast<Mbarrier*>(emulator::shared_at(barrier, sizeof(Mbarrier)));
}

inline void mbarrier_init(uint32_t barrier, int arrivals) {
  mbarrier_at(barrier) = {uint16_t(arrivals), 0, 0};
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint32_t barrier) {
  Mbarrier& b = mbarrier_at(barrier);
  emulator::machine.idle = 0;
  if (++b.arrived == b.expects) b.arrived = 0, ++b.phase;
}
inline void mbarrier_arrive_after_copies(uint32_t barrier) {
  emulator::arrive_after_copies([barrier] { mbarrier_arrive(barrier); });
}
// The copies land when a thread waits for this barrier and everything else that it expects has
// arrived.
inline void mbarrier_wait(uint32_t barrier, int phase) {
  while ((mbarrier_at(barrier).phase & 1) == (unsigned(phase) & 1)) {
    if (!emulator::land_oldest()) emulator::yield_to_block();
  }
}

}  // namespace flashcell::cuda
