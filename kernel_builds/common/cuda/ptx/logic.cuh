// Two logical operations with two constants in one instruction, where compilers take two.
#pragma once
#include <cstdint>

#include "common/cuda/device.cuh"

namespace flashcell::cuda {

DEVICE uint32_t and_or(uint32_t word, uint32_t mask, uint32_t bits) {  // (word & mask) | bits
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "r"(mask), "r"(bits));
  return result;
}
DEVICE uint32_t and_xor(uint32_t word, uint32_t mask, uint32_t bits) {  // (word & mask) ^ bits
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(result) : "r"(word), "r"(mask), "r"(bits));
  return result;
}

}  // namespace flashcell::cuda
