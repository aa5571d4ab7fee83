// The operands of a matrix product: their element type in memory, and how they are multiplied.
#pragma once
#include "common/cpu/load_store.h"

namespace flashcell::FLASHCELL_ISA {

// Element is the type that the microkernel multiplies. 16-bit dtypes are rounded and then widened
// to fp32, except where the hardware multiplies pairs of bf16 itself. kDepth elements of the depth
// are interleaved in one lane, and multiplied in kTurns instructions.
template <typename IO>
struct Product {
  using Element = State<IO>;
  static constexpr int kDepth = 1, kTurns = 1;
  using Raw = typename Vec<Element>::Raw;
  static FN Vec<Element> broadcast(const Element* p, int = 0) { return Vec<Element>(*p); }
  static FN Vec<Element> load_columns(const Element* p, int = 0) { return load(p); }
  static FN Vec<Element> multiply_add(Vec<Element> acc, Vec<Element> a, Vec<Element> b) {
    return acc + a * b;
  }
};

#if defined(__AVX512BF16__)
template <>
struct Product<bf16> {
  using Element = bf16;
  static constexpr int kDepth = 2, kTurns = 1;
  static FN __m512i broadcast(const bf16* p, int = 0) {
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    return _mm512_set1_epi32(pair);
  }
  static FN __m512i load_columns(const bf16* p, int = 0) { return _mm512_loadu_si512(p); }
  static FN Vec<float> multiply_add(Vec<float> acc, __m512i a, __m512i b) {
    return (Vec<float>::Raw)_mm512_dpbf16_ps((__m512)acc.raw, (__m512bh)a, (__m512bh)b);
  }
};

// Multiplies pairs of bf16 in fp32: the first elements of all pairs, then the second. An Intel core
// is faster this way than with its pair instruction (GFLOP/s of 6 x 4 sums: pair instruction 95,
// this way 127, fp32 158; on a Zen 5: pair instruction 533, fp32 265).
struct WidenedPairs {
  static constexpr int kDepth = 2, kTurns = 2;
  static FN Vec<float> half(__m512i pairs, int turn) {
    const __m512i high = _mm512_set1_epi32(int(0xffff0000));
    const __m512i bits = turn == 0 ? _mm512_slli_epi32(pairs, 16) : _mm512_and_si512(pairs, high);
    return (Vec<float>::Raw)bits;
  }
  static FN Vec<float> broadcast(const bf16* p, int turn) {
    return half(Product<bf16>::broadcast(p), turn);
  }
  static FN Vec<float> load_columns(const bf16* p, int turn) {
    return half(Product<bf16>::load_columns(p), turn);
  }
  static FN Vec<float> multiply_add(Vec<float> acc, Vec<float> a, Vec<float> b) {
    return acc + a * b;
  }
};
#elif defined(FLASHCELL_NEON_BF16)
template <>
struct Product<bf16> {
  using Element = bf16;
  static constexpr int kDepth = 2, kTurns = 1;
  static FN bfloat16x8_t broadcast(const bf16* p, int = 0) {
    uint32_t pair;
    memcpy(&pair, p, sizeof pair);
    return vreinterpretq_bf16_u32(vdupq_n_u32(pair));
  }
  static FN bfloat16x8_t load_columns(const bf16* p, int = 0) {
    return vreinterpretq_bf16_u16(vld1q_u16((const uint16_t*)p));
  }
  static FN Vec<float> multiply_add(Vec<float> acc, bfloat16x8_t a, bfloat16x8_t b) {
    return (Vec<float>::Raw)vbfdotq_f32((float32x4_t)acc.raw, a, b);
  }
};
#endif

template <typename IO>
using Element = typename Product<IO>::Element;

// Interleaves two rows into the pairs that the hardware multiplies.
FN void store_pairs(bf16* to, Word first, Word second) {
  const Word pairs = first | second << 16;
  memcpy(to, &pairs, sizeof pairs);
}
FN Word columns_of(const bf16* p) {
  Short bits;
  memcpy(&bits, p, sizeof bits);
  return __builtin_convertvector(bits, Word);
}

FN void store_element(float* p, Vec<float> v) { store(p, v); }
FN void store_element(double* p, Vec<double> v) { store(p, v); }
FN void store_element(bf16* p, Vec<float> v) { store_io(p, v); }

// Rounds to IO, then stores as an element type of operands: IO or its state.
template <typename IO, typename E>
FN void store_operand(E* p, Vec<State<IO>> v) {
  if constexpr (sizeof(IO) == sizeof(E)) {
    store_io(p, v);
  } else {
    IO rounded[Vec<State<IO>>::kWidth];
    store_io(rounded, v);
    store_element(p, load_io(rounded));
  }
}

// The same for the first `count` lanes.
template <typename IO>
FN void store_operand_part(Element<IO>* p, Vec<State<IO>> v, int count) {
  if constexpr (sizeof(IO) == sizeof(Element<IO>)) {
    store_part<false>(p, v, count);
  } else {
    IO rounded[Vec<State<IO>>::kWidth];
    store_io(rounded, v);
    store_part<false>(p, load_io(rounded), count);
  }
}

template <typename IO>
constexpr int64_t padded_depth(int64_t k) {
  return (k + Product<IO>::kDepth - 1) / Product<IO>::kDepth * Product<IO>::kDepth;
}

}  // namespace flashcell::FLASHCELL_ISA
