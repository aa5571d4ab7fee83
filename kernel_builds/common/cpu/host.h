// What a CPU engine asks of its host: threads and memory, without torch.
#pragma once
#include <cstdint>

namespace flashcell {

struct Host {
  void (*parallel)(int64_t count, void (*body)(void* context, int64_t begin, int64_t end),
                   void* context);
  void* (*allocate)(int64_t bytes);  // 64-byte aligned, uninitialised; throws, never null
  void (*release)(void* pointer);
  int threads;
};

}  // namespace flashcell
