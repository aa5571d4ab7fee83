// The functions of common/cuda/ptx/mbarrier.cuh.
#pragma once
#include "common/cuda/ptx/mma.cuh"

namespace flashcell::cuda {

struct Mbarrier {  // in shared memory
  uint16_t expects, arrived;
  uint32_t phase;
};
inline Mbarrier& mbarrier_at(uint32_t barrier) {
  return *reinterpret_cast<Mbarrier*>(emulator::shared_at(barrier, sizeof(Mbarrier)));
}

inline void barrier_init(uint32_t barrier, int arrivals) {
  mbarrier_at(barrier) = {uint16_t(arrivals), 0, 0};
}
inline void barrier_init_fence() {}
inline void barrier_arrive(uint32_t barrier) {
  Mbarrier& b = mbarrier_at(barrier);
  emulator::machine.idle = 0;
  if (++b.arrived == b.expects) b.arrived = 0, ++b.phase;
}
inline void barrier_arrive_after_copies(uint32_t barrier) {
  emulator::arrive_after_copies([barrier] { barrier_arrive(barrier); });
}
// Copies land when somebody waits for them, and has waited for everything else.
inline void barrier_wait(uint32_t barrier, int phase) {
  while ((mbarrier_at(barrier).phase & 1) == (unsigned(phase) & 1)) {
    if (!emulator::land_oldest()) emulator::yield_to_block();
  }
}

inline void fence_for_wgmma() {}
inline void sync_threads(int name, int threads) { emulator::barrier(name, unsigned(threads)); }

template <int>
void take_registers() {}
template <int>
void leave_registers() {}

}  // namespace flashcell::cuda
