// Widens weights of 8 and 4 bits to the 16-bit operands of the matrix instruction. Their bits
// become part of a 16-bit number whose exponent is known, and one multiply-add takes that away
// again. That rounds nothing: bf16 and fp16 hold all values of int8, float8_e4m3fn and int4.
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

// Returns both elements of a word the factor of a group, which comes as the bits of a bf16. That of
// fp16 is 32 times as large, so that factors from 2e-6 on lose no bits; widen_int4 takes it back.
template <typename IO>
DEVICE uint32_t twice_scale(uint32_t bits) {
  if constexpr (std::is_same_v<IO, bf16>) return bits | bits << 16;
  const float scale = __uint_as_float(bits << 16) * 32;
  return Pair<IO>::of(scale, scale).word[0];
}

// Returns the weights in the low four bits of the word's bytes, first to last, times their group's
// factor, rounded to IO.
template <typename IO>
DEVICE uint2 widen_int4(uint32_t word, uint32_t scale) {
  constexpr bool kIsBf16 = std::is_same_v<IO, bf16>;
  // The high byte of 128 (bf16) or 1024 (fp16): with the four bits below it the number is that,
  // plus 8, plus the weight.
  constexpr uint32_t kBits = kIsBf16 ? 0x43 : 0x64;
  constexpr uint32_t kFactor = kIsBf16 ? 0x3f80 : 0x2800;  // 1, or 1 / 32
  constexpr uint32_t kLess = kIsBf16 ? 0xc308 : 0xd008;    // -136, or -1032 / 32
  constexpr uint32_t kMinusZero = 0x8000;
  word &= 0x0f0f0f0f;
  const auto two = [&](uint32_t bytes) {
    const uint32_t weights = multiply_add<IO>(bytes, twice(kFactor), twice(kLess));
    return multiply_add<IO>(weights, scale, twice(kMinusZero));
  };
  return {two(__byte_perm(word, kBits, 0x4140)), two(__byte_perm(word, kBits, 0x4342))};
}

}  // namespace flashcell::cuda
