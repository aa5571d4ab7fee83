// Scratch memory that frees itself, parallel_for over a callable, and the rule when one thread is
// enough.
#pragma once
#include "common/cpu/host.h"

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

// Runs body(begin, end) once on every thread, so that a thread can allocate its scratch once.
template <typename Body>
void parallel_ranges(const Host& host, int64_t count, const Body& body) {
  if (count == 0) return;
  auto run = [](void* context, int64_t begin, int64_t end) { (*(const Body*)context)(begin, end); };
  host.parallel(count, run, (void*)&body);
}

template <typename Body>
void parallel_for(const Host& host, int64_t count, const Body& body) {
  parallel_ranges(host, count, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(i);
  });
}

constexpr int64_t kBarrierMultiplyAdds = 400 * 1000;  // a step this small costs less than a barrier

// Returns a host that runs everything on the calling thread if the work is small. A call cheaper
// than a barrier gains nothing from a second thread, and where another process occupies that
// thread's core, the call would wait a time slice for it (a decoding step of 2 heads of width 128
// beside two busy processes: 53 us on average without the barrier, 311 us with it).
inline __attribute__((always_inline)) Host fitting(const Host& host, int64_t multiply_adds) {
  if (multiply_adds >= kBarrierMultiplyAdds) return host;
  return {[](int64_t count, void (*body)(void*, int64_t, int64_t), void* context) {
            body(context, 0, count);
          },
          host.allocate, host.release, 1};
}

}  // namespace flashcell::FLASHCELL_ISA
