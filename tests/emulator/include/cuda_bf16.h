#pragma once
#include "cuda_runtime.h"

struct __nv_bfloat16 {
  uint16_t bits;

  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) {
    const uint32_t word = __float_as_uint(x), even = word >> 16 & 1;
    bits = std::isnan(x) ? 0x7fff : uint16_t((word + 0x7fff + even) >> 16);
  }
  explicit operator float() const { return __uint_as_float(uint32_t(bits) << 16); }
};
