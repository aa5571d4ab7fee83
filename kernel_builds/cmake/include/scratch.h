// Scratch memory that returns itself, and parallel_for over a callable.
#pragma once
#include "host.h"

namespace flashcell::FLASHCELL_ISA {

template <typename T>
struct Scratch {
  T* data;
  const Host& host;
  Scratch(const Host& h, int64_t count)
      : data((T*)h.allocate(count > 0 ? count * sizeof(T) : 64)), host(h) {}
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { host.release(data); }
  operator T*() const { return data; }
};

template <typename Body>
void parallel_for(const Host& host, int64_t count, const Body& body) {
  if (count == 0) return;
  auto run = [](void* context, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) (*(const Body*)context)(i);
  };
  host.parallel(count, run, (void*)&body);
}

}  // namespace flashcell::FLASHCELL_ISA
