// Writes operands of an exact product (split.h).
#pragma once
#include "quad.cuh"
#include "split.h"

namespace flashcell::cuda::gemm {

DEVICE float round_to_tf32(float x) {
  uint32_t bits = __float_as_uint(x);
  if constexpr (!kIsTuring) asm("cvt.rna.tf32.f32 %0, %0;" : "+r"(bits));
  return __uint_as_float(bits);
}

// The low half of x, whose high half is given. Infinity, or what rounds to it, has none.
DEVICE float low_half(float x, float high) { return isinf(high) ? 0.f : round_to_tf32(x - high); }

// Returns where four neighbouring elements of a row's depth, from `at` on, begin.
DEVICE int64_t place_of_quad(const Operand& operand, int64_t row, int64_t head, int group, int at) {
  const int64_t panel = (head * operand.groups + group) * operand.panels + at / kPanel;
  const int piece = at % kPanel / kQuad ^ int(row % 8);
  return (panel * operand.rows + row) * kPanelBytes + piece * 16;
}

DEVICE void store_halves(char* to, int64_t half_bytes, const float (&v)[kQuad]) {
  float high[kQuad], low[kQuad];
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    high[i] = round_to_tf32(v[i]), low[i] = low_half(v[i], high[i]);
  }
  store_quad(reinterpret_cast<float*>(to), high);
  store_quad(reinterpret_cast<float*>(to + half_bytes), low);
}

}  // namespace flashcell::cuda::gemm
