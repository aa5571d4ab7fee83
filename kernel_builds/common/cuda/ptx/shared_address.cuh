// Converts pointers into shared memory to the 32-bit addresses that PTX takes, and accesses memory
// at them.
#pragma once
#include <cstdint>

#include "common/cuda/device.cuh"

namespace flashcell::cuda {

DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

DEVICE void load_shared(float (&values)[4], uint32_t from) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
               : "r"(from)
               : "memory");
}
DEVICE void load_shared(float& a, float& b, uint32_t from) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(a), "=f"(b) : "r"(from) : "memory");
}
DEVICE void load_shared(float& value, uint32_t from) {
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from) : "memory");
}
DEVICE void store_shared(uint32_t to, const float (&values)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(values[0]), "f"(values[1]),
               "f"(values[2]), "f"(values[3])
               : "memory");
}
DEVICE void store_shared(uint32_t to, const float (&values)[2]) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(values[0]), "f"(values[1])
               : "memory");
}
DEVICE void store_shared(uint32_t to, const float (&values)[1]) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(values[0]) : "memory");
}

}  // namespace flashcell::cuda
