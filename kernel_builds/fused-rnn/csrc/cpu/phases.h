// Phases of one parallel region. Free threads take the tasks of a phase, and none goes on before
// all tasks are done. A thread waits for tasks, not for other threads: these take the tasks of a
// thread that comes late or never, so nothing hangs where threads run one after the other.
#pragma once
#include <sched.h>

#include <cstdint>

#include "common/cells/math.h"
#include "common/cpu/host.h"

namespace flashcell::FLASHCELL_ISA {

struct Phase {
  // Each counter has its own cache line: one is written while the other is polled.
  alignas(64) int64_t next = 0;
  alignas(64) int64_t done = 0;
};

// Calls task(i) once for every i < count, shared among all threads that call this function.
template <typename Task>
FN void share(Phase& phase, int64_t count, const Task& task) {
  constexpr int kPauses = 1000;  // some 20 us, after which the core is yielded to other threads
  int64_t mine = 0;
  for (;; ++mine) {
    const int64_t i = __atomic_fetch_add(&phase.next, 1, __ATOMIC_RELAXED);
    if (i >= count) break;
    task(i);
  }
  __atomic_fetch_add(&phase.done, mine, __ATOMIC_RELEASE);
  for (int n = 1; __atomic_load_n(&phase.done, __ATOMIC_ACQUIRE) < count; ++n) {
    pause_core();
    if (n % kPauses == 0) sched_yield();
  }
}

}  // namespace flashcell::FLASHCELL_ISA
