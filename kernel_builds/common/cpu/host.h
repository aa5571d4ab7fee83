// The functions a CPU engine needs from its host, threads and memory, so that engines do not depend
// on torch.
#pragma once
#include <cstdint>

namespace flashcell {

// Lets a core wait for some tens of cycles in a loop that polls memory.
inline __attribute__((always_inline)) void pause_core() {
#if defined(__aarch64__)
  __asm__ volatile("isb" ::: "memory");  // `yield` does nothing on a core without SMT
#else
  __builtin_ia32_pause();
#endif
}

struct Host {
  void (*parallel)(int64_t count, void (*body)(void* context, int64_t begin, int64_t end),
                   void* context);
  // Returns 64-byte aligned, uninitialised memory; throws on failure, never returns null.
  void* (*allocate)(int64_t bytes);
  void (*release)(void* pointer);
  int threads;
};

}  // namespace flashcell
