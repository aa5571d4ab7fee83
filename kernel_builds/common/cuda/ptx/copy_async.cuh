// Asynchronous copies from global to shared memory (cp.async), in groups. Every thread waits for
// its own copies. Turing has none: there every copy is a load and a store, done when the function
// returns, and there is nothing to wait for.
#pragma once
#include <cstdint>

#include "common/cuda/device.cuh"
#include "common/cuda/ptx/shared_address.cuh"

namespace flashcell::cuda {

// Turing's copy of 4, 8 or 16 bytes; writes zeros where `copy` is false. Like cp.async.cg it reads
// from L2.
template <int kBytes>
DEVICE void copy_at_once(uint32_t shared, const void* global, bool copy = true) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
#define FLASHCELL_COPY(type, zeros, list)                                                 \
  asm volatile("{\n.reg .pred p;\n.reg .b32 w<4>;\nsetp.ne.b32 p, %2, 0;\n" zeros         \
               "@p ld.global.cg." type " " list ", [%1];\nst.shared." type " [%0], " list \
               ";\n}" ::"r"(shared),                                                      \
               "l"(global), "r"(int(copy))                                                \
               : "memory")
  if constexpr (kBytes == 16) {
    FLASHCELL_COPY("v4.b32", "mov.b32 w0, 0;\nmov.b32 w1, 0;\nmov.b32 w2, 0;\nmov.b32 w3, 0;\n",
                   "{w0, w1, w2, w3}");
  } else if constexpr (kBytes == 8) {
    FLASHCELL_COPY("v2.b32", "mov.b32 w0, 0;\nmov.b32 w1, 0;\n", "{w0, w1}");
  } else {
    FLASHCELL_COPY("b32", "mov.b32 w0, 0;\n", "w0");
  }
#undef FLASHCELL_COPY
}

// Starts a copy of 16 bytes, past L1.
DEVICE void copy_async(uint32_t shared, const void* global) {
  if constexpr (kIsTuring) return copy_at_once<16>(shared, global);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
DEVICE void copy_async(void* shared, const void* global) {
  copy_async(shared_address(shared), global);
}
// Starts a copy of 4 or 8 bytes.
template <int kBytes>
DEVICE void copy_short_async(void* shared, const void* global) {
  if constexpr (kIsTuring) return copy_at_once<kBytes>(shared_address(shared), global);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(shared)),
               "l"(global), "n"(kBytes)
               : "memory");
}
// Starts a copy of 4, 8 or 16 bytes, which writes zeros where `copy` is false. The address must be
// valid in both cases.
template <int kBytes>
DEVICE void copy_or_zero(uint32_t shared, const void* global, bool copy) {
  if constexpr (kIsTuring) return copy_at_once<kBytes>(shared, global, copy);
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
                 "r"(copy ? 16 : 0)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global),
                 "n"(kBytes), "r"(copy ? kBytes : 0)
                 : "memory");
  }
}
DEVICE void copy_async_or_zero(uint32_t shared, const void* global, bool copy) {
  copy_or_zero<16>(shared, global, copy);
}
DEVICE void copy_word_or_zero(uint32_t shared, const void* global, bool copy) {
  copy_or_zero<4>(shared, global, copy);
}
DEVICE void copy_word_or_zero(float* shared, const float* global, bool copy) {
  copy_word_or_zero(shared_address(shared), global, copy);
}

// The L2 eviction policy for copy_async_evicted_last (Turing has none), and the copy of 16 bytes
// whose cache line is evicted last until evict_in_turn gives its 128 bytes back to normal priority.
DEVICE uint64_t evict_last_policy() {
  uint64_t policy = 0;
  if constexpr (!kIsTuring) {
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  }
  return policy;
}
DEVICE void copy_async_evicted_last(void* shared, const void* global, uint64_t policy) {
  if constexpr (kIsTuring) return copy_at_once<16>(shared_address(shared), global);
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
      "l"(global), "l"(policy)
      : "memory");
}
DEVICE void evict_in_turn(uintptr_t line) {
  if constexpr (!kIsTuring) {
    asm volatile("applypriority.global.L2::evict_normal [%0], 128;" ::"l"(line) : "memory");
  }
}

// Ends a group of copies.
DEVICE void copy_commit() {
  if constexpr (!kIsTuring) asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most kPending of this thread's groups are still in flight.
template <int kPending>
DEVICE void copy_wait() {
  if constexpr (!kIsTuring) asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flashcell::cuda
