// Phases of one parallel region: the tasks of a phase are taken by whoever is free, and nobody goes
// on before all of them are done. A thread that comes late, or never, is not waited for: others
// have its tasks by then. So nothing hangs where threads run one after the other.
#pragma once
#include <sched.h>

#include <cstdint>

#include "common/cells/math.h"

namespace flashcell::FLASHCELL_ISA {

struct Phase {
  alignas(64) int64_t next = 0;  // a line of their own each: one is written while the other is read
  alignas(64) int64_t done = 0;
};

// task(i) for every i < count, by all threads that call this together.
template <typename Task>
FN void share(Phase& phase, int64_t count, const Task& task) {
  constexpr int kPauses = 1000;  // some 20 us, after which the core is offered to who may need it
  int64_t mine = 0;
  for (;; ++mine) {
    const int64_t i = __atomic_fetch_add(&phase.next, 1, __ATOMIC_RELAXED);
    if (i >= count) break;
    task(i);
  }
  __atomic_fetch_add(&phase.done, mine, __ATOMIC_RELEASE);
  for (int n = 1; __atomic_load_n(&phase.done, __ATOMIC_ACQUIRE) < count; ++n) {
    __builtin_ia32_pause();
    if (n % kPauses == 0) sched_yield();
  }
}

}  // namespace flashcell::FLASHCELL_ISA
