// Emulated functions of common/cuda/ptx/logic.cuh.
#pragma once
#include "common/cuda/device.cuh"

namespace flashcell::cuda {

inline uint32_t and_or(uint32_t word, uint32_t mask, uint32_t bits) { return (word & mask) | bits; }
inline uint32_t and_xor(uint32_t word, uint32_t mask, uint32_t bits) {
  return (word & mask) ^ bits;
}

}  // namespace flashcell::cuda
