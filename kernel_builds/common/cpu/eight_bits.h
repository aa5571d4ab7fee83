// Weights of 8 bits: loads them widened, so that a product reads a quarter of the bytes of fp32.
#pragma once
#include "common/cpu/load_store.h"

namespace flashcell::FLASHCELL_ISA {

// A weight in a product whose other operand is of type IO. The factor of its row multiplies the
// sum.
template <typename IO>
struct int8 {
  int8_t value;
};
template <typename IO>
struct StateOf<int8<IO>> {
  using type = State<IO>;
};

template <typename IO>
FN Vec<State<IO>> load_io(const int8<IO>* p) {
  using V = Vec<State<IO>>;
#if defined(__AVX512F__)  // GCC would convert four lanes at a time
  if constexpr (V::kWidth == 16) {
    return (typename V::Raw)_mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
  }
#elif defined(__AVX2__)
  if constexpr (V::kWidth == 8) {
    return (typename V::Raw)_mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
  }
#endif
  typedef int8_t Bytes __attribute__((vector_size(V::kWidth)));
  Bytes bytes;
  memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, typename V::Raw);
}

#if defined(__AVX512F__)
template <typename IO>
FN Vec<State<IO>> load_first(const int8<IO>* p, int count) {
  const __m128i bytes = _mm_maskz_loadu_epi8(first_lanes(count), p);
  return load_io((const int8<IO>*)&bytes);
}
#endif

// Loads fp32 factors as the type T of sums.
template <bool Whole, typename T>
FN Vec<T> load_scales(const float* p, int count) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return load_part<Whole>(p, count);
  } else {
    T lanes[Vec<T>::kWidth] = {};
    for (int i = 0; i < count; ++i) lanes[i] = p[i];
    return load(lanes);
  }
}

}  // namespace flashcell::FLASHCELL_ISA
