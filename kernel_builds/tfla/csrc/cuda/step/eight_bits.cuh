// Widens 8-bit weights to the 16-bit operands of the matrix instruction, without rounding: bf16 and
// fp16 hold all values of int8 and of float8_e4m3fn. A byte becomes part of a 16-bit number whose
// exponent is known, and one multiply-add takes that away again.
#pragma once
#include "../../params.h"
#include "common/cuda/ptx/mma.cuh"

namespace flashcell::cuda {

// Returns both elements of a word twice the same constant.
DEVICE constexpr uint32_t twice(uint32_t bits) { return bits | bits << 16; }

// Returns two int8, each in the low byte of an element, as IO.
template <typename IO>
DEVICE uint32_t widen_int8(uint32_t bytes) {
  if constexpr (std::is_same_v<IO, bf16>) {
    // 128 + the low 7 bits, less 128 or, with a sign, 256
    const uint32_t low = (bytes & twice(0x7f)) | twice(0x4300);
    return multiply_add<IO>(low, twice(0x3f80), (bytes & twice(0x80)) | twice(0xc300));
  } else {
    // 1024 + 128 + the value, less 1152
    return multiply_add<IO>(bytes ^ twice(0x6480), twice(0x3c00), twice(0xe480));
  }
}

// Returns two float8_e4m3fn, each in the high byte of an element, as IO. The exponent's bias is 7,
// those of bf16 and fp16 are 127 and 15: the bits moved into place are smaller by 2^120 and 2^8.
// Subnormal values are exact, and NaN becomes 480.
template <typename IO>
DEVICE uint32_t widen_fp8(uint32_t bytes) {
  const uint32_t sign = bytes & twice(0x8000);
  if constexpr (std::is_same_v<IO, bf16>) {
    return multiply_add<IO>(sign | (bytes >> 4 & twice(0x07f0)), twice(0x7b80), twice(0x8000));
  } else {
    return multiply_add<IO>(sign | (bytes >> 1 & twice(0x3f80)), twice(0x5c00), twice(0x8000));
  }
}

// Returns the four values of a word, first to last, as two words of IO.
template <typename IO, Eight kEight>
DEVICE uint2 widen(uint32_t word) {
  if constexpr (kEight == Eight::kInt8) {
    return {widen_int8<IO>(__byte_perm(word, 0, 0x4140)),
            widen_int8<IO>(__byte_perm(word, 0, 0x4342))};
  } else {
    return {widen_fp8<IO>(__byte_perm(word, 0, 0x1404)),
            widen_fp8<IO>(__byte_perm(word, 0, 0x3424))};
  }
}

}  // namespace flashcell::cuda
