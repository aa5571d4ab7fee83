// Barriers in shared memory, and what else lets warps of a block play different parts: producers
// that copy, consumers that multiply. sm_90.
#pragma once
#include "common/cuda/ptx/mma.cuh"

namespace flashcell::cuda {

// A barrier turns to its next phase when all that it expects have arrived; phases count from 0.
DEVICE void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// After all inits, before the barrier that shows them to other threads.
DEVICE void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEVICE void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives once this thread's copies so far have landed; it goes on at once. `arrivals` counts it.
DEVICE void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
// Until phase `phase` is over: no earlier than the last one but one.
DEVICE void barrier_wait(uint32_t barrier, int phase) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@done bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(barrier),
      "r"(phase & 1)
      : "memory");
}

// What is in shared memory as this thread sees it, its own stores and what barriers have told it
// of, is there for the wgmma that follows. A thread whose copies are in flight would wait for them
// here.
DEVICE void fence_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A barrier of `threads` threads, whole warps; 0 is __syncthreads.
DEVICE void sync_threads(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// Registers of a thread from here on: all warps of a warpgroup ask at once.
template <int kRegisters>
DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
DEVICE void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace flashcell::cuda
