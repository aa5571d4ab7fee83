// Widens weights of 8 and 4 bits to the 16-bit operands of the matrix instruction. Their bits
// become part of a 16-bit number whose exponent is known. Of 8 bits one multiply-add takes that
// away again; of int4 the matrix instruction does. That rounds no weight: bf16 and fp16 hold all
// values of int8, float8_e4m3fn and int4.
#pragma once
#include "../../params.h"
#include "common/cuda/ptx/logic.cuh"
#include "common/cuda/ptx/mma.cuh"

namespace flashcell::cuda {

// Returns both elements of a word twice the same constant.
DEVICE constexpr uint32_t twice(uint32_t bits) { return bits | bits << 16; }

// Returns two int8, each in the low byte of an element, as IO.
template <typename IO>
DEVICE uint32_t widen_int8(uint32_t bytes) {
  if constexpr (std::is_same_v<IO, bf16>) {
    // 128 + the low 7 bits, less 128 or, with a sign, 256
    const uint32_t low = and_or(bytes, twice(0x7f), twice(0x4300));
    return multiply_add<IO>(low, twice(0x3f80), and_or(bytes, twice(0x80), twice(0xc300)));
  } else {
    // 1024 + 128 + the value, less 1152
    const uint32_t value = and_xor(bytes, twice(0xff), twice(0x6480));
    return multiply_add<IO>(value, twice(0x3c00), twice(0xe480));
  }
}

// Returns two float8_e4m3fn, each in the high byte of an element, as IO. The exponent's bias is 7,
// those of bf16 and fp16 are 127 and 15: the bits moved into place are smaller by 2^120 and 2^8.
// Subnormal values are exact, and NaN becomes 480.
template <typename IO>
DEVICE uint32_t widen_fp8(uint32_t bytes) {
  const uint32_t sign = bytes & twice(0x8000);
  if constexpr (std::is_same_v<IO, bf16>) {
    return multiply_add<IO>(and_or(bytes >> 4, twice(0x07f0), sign), twice(0x7b80), twice(0x8000));
  } else {
    return multiply_add<IO>(and_or(bytes >> 1, twice(0x3f80), sign), twice(0x5c00), twice(0x8000));
  }
}

// Returns the four values of a word as two words of IO: the first and third, the second and fourth.
template <typename IO, Format kFormat>
DEVICE uint2 widen(uint32_t word) {
  if constexpr (kFormat == Format::kInt8) {
    return {widen_int8<IO>(word), widen_int8<IO>(word >> 8)};
  } else {
    return {widen_fp8<IO>(word << 8), widen_fp8<IO>(word)};
  }
}
// Returns x in the same order.
DEVICE uint4 every_other(const uint4& x) {
  return {__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.x, x.y, 0x7632),
          __byte_perm(x.z, x.w, 0x5410), __byte_perm(x.z, x.w, 0x7632)};
}

// Returns the weights in bits 4 k and 16 + 4 k of a word of int4, plus a constant: four bits become
// part of a number from 128 to 143 (bf16) or 64 to 79 (fp16), and stand for themselves less 8.
template <typename IO, int k>
DEVICE uint32_t widen_int4(uint32_t word) {
  if constexpr (std::is_same_v<IO, bf16>) {
    return and_or(word >> 4 * k, twice(0xf), twice(0x4300));
  } else {
    return and_or(k > 0 ? word >> 4 * (k - 1) : word << 4, twice(0xf0), twice(0x5400));
  }
}
// Returns what takes the constant and the 8 away: -136 or -72, twice.
template <typename IO>
DEVICE constexpr uint32_t less_of_int4() {
  return twice(std::is_same_v<IO, bf16> ? 0xc308 : 0xd480);
}

}  // namespace flashcell::cuda
