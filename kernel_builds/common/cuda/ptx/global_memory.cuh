// Accesses of global memory that C++ cannot express.
#pragma once
#include <cstdint>

#include "common/cuda/device.cuh"

namespace flashcell::cuda {

// Loads kLoaded words (1, 2 or 4) from memory that nothing writes meanwhile, if `wanted`; otherwise
// they become 0. (If they stayed as they are, registers would hold them from one call to the next.)
template <int kLoaded, int kCount>
DEVICE void load_constant_if(uint32_t (&words)[kCount], const void* from, bool wanted) {
  static_assert(kLoaded <= kCount && (kLoaded == 1 || kLoaded == 2 || kLoaded == 4));
#pragma unroll
  for (int i = 0; i < kLoaded; ++i) words[i] = 0;
  if constexpr (kLoaded == 1) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p ld.global.nc.b32 %0, [%1];\n}"
                 : "+r"(words[0])
                 : "l"(from), "r"(int(wanted)));
  } else if constexpr (kLoaded == 2) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p ld.global.nc.v2.b32 {%0, %1}, [%2];\n}"
        : "+r"(words[0]), "+r"(words[1])
        : "l"(from), "r"(int(wanted)));
  } else {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
        "@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
        : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
        : "l"(from), "r"(int(wanted)));
  }
}
// The same for the 16 bits of one word; its upper half becomes 0.
DEVICE void load_half_constant_if(uint32_t& word, const void* from, bool wanted) {
  word = 0;
  asm volatile(
      "{\n.reg .pred p;\n.reg .b16 h;\nsetp.ne.b32 p, %2, 0;\ncvt.u16.u32 h, %0;\n"
      "@p ld.global.nc.b16 h, [%1];\ncvt.u32.u16 %0, h;\n}"
      : "+r"(word)
      : "l"(from), "r"(int(wanted)));
}
DEVICE void load_if(float& value, const void* from, bool wanted) {
  value = 0;
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p ld.global.f32 %0, [%1];\n}"
               : "+f"(value)
               : "l"(from), "r"(int(wanted)));
}
DEVICE void load_if(float& a, float& b, const void* from, bool wanted) {
  a = b = 0;
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p ld.global.v2.f32 {%0, %1}, [%2];\n}"
               : "+f"(a), "+f"(b)
               : "l"(from), "r"(int(wanted)));
}
DEVICE void load_if(float (&values)[4], const void* from, bool wanted) {
  values[0] = values[1] = values[2] = values[3] = 0;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p ld.global.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
      : "+f"(values[0]), "+f"(values[1]), "+f"(values[2]), "+f"(values[3])
      : "l"(from), "r"(int(wanted)));
}

// A counter by which thread blocks tell each other what they have written. What the thread wrote
// before add_released, and what it knows of, is visible after wait_acquired has seen the sum.
DEVICE void add_released(unsigned* counter, unsigned value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}
DEVICE void wait_acquired(const unsigned* counter, unsigned least) {
  unsigned value;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  } while (value < least);
}

// Keeps the compiler from computing several pointers from this one ahead of their use.
template <typename T>
DEVICE void keep_pointer(T*& pointer) {
  asm volatile("" : "+l"(pointer));
}

}  // namespace flashcell::cuda
