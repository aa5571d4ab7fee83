// Loads and stores of vectors: converts each dtype between memory and registers, for whole and for
// partial vectors.
#pragma once
#include "common/cpu/vec.h"
#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace flashcell::FLASHCELL_ISA {

struct fp16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

template <typename IO>
struct StateOf {  // maps an I/O dtype to the dtype of states, biases and sums
  using type = float;
};
template <>
struct StateOf<double> {
  using type = double;
};
template <typename IO>
using State = typename StateOf<IO>::type;

constexpr int kFloats = Vec<float>::kWidth;
typedef uint32_t Word __attribute__((vector_size(kVectorBytes)));
typedef uint16_t Short __attribute__((vector_size(kVectorBytes / 2)));

FN Vec<float> load_io(const float* p) { return load(p); }
FN Vec<double> load_io(const double* p) { return load(p); }
FN void store_io(float* p, Vec<float> v) { store(p, v); }
FN void store_io(double* p, Vec<double> v) { store(p, v); }

FN Vec<float> load_io(const bf16* p) {
  Short bits;
  memcpy(&bits, p, sizeof bits);
  return (Vec<float>::Raw)(__builtin_convertvector(bits, Word) << 16);
}

FN Word to_bf16(Vec<float> v) {  // rounds to nearest even; NaN becomes the quiet NaN 0x7fc0
  const Word u = (Word)v.raw;
  const Word rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (Word)select(v != v, Vec<float>((Vec<float>::Raw)(Word{} + 0x7fc0u)),
                      Vec<float>((Vec<float>::Raw)rounded))
      .raw;
}

FN void store_io(bf16* p, Vec<float> v) {
#if defined(__AVX512F__)  // one instruction; GCC would take two, of eight lanes each
  const __m256i bits = _mm512_cvtepi32_epi16((__m512i)to_bf16(v));
#elif defined(FLASHCELL_NEON_BF16)
  const float32x4_t f = (float32x4_t)v.raw;
  const uint16x4_t rounded = vreinterpret_u16_bf16(vcvt_bf16_f32(f));  // keeps a NaN's bits
  const uint16x4_t bits = vbsl_u16(vmovn_u32(vceqq_f32(f, f)), rounded, vdup_n_u16(0x7fc0));
#else
  const Short bits = __builtin_convertvector(to_bf16(v), Short);
#endif
  memcpy(p, &bits, sizeof bits);
}

#if defined(__AVX512F__)
FN Vec<float> load_io(const fp16* p) {
  return (Vec<float>::Raw)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
FN void store_io(fp16* p, Vec<float> v) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v.raw, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__F16C__)
FN Vec<float> load_io(const fp16* p) {
  return (Vec<float>::Raw)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
FN void store_io(fp16* p, Vec<float> v) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v.raw, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__aarch64__)  // these conversions are part of armv8-a
FN Vec<float> load_io(const fp16* p) {
  return (Vec<float>::Raw)vcvt_f32_f16((float16x4_t)vld1_u16((const uint16_t*)p));
}
FN void store_io(fp16* p, Vec<float> v) {
  vst1_u16((uint16_t*)p, (uint16x4_t)vcvt_f16_f32((float32x4_t)v.raw));
}
#else
FN float to_float(fp16 half) {
  const uint32_t sign = (half.bits & 0x8000u) << 16, magnitude = half.bits & 0x7fffu;
  // Shift exponent and mantissa into place as a float, then rescale with a multiplication, which
  // handles denormals too; exponent 31 means infinity or NaN.
  uint32_t u = magnitude << 13;
  float f;
  memcpy(&f, &u, 4);
  f *= 0x1p112f;
  memcpy(&u, &f, 4);
  if (magnitude >= 0x7c00u) u = 0x7f800000u | (magnitude & 0x3ffu) << 13;
  u |= sign;
  memcpy(&f, &u, 4);
  return f;
}

FN fp16 to_half(float value) {
  uint32_t u;
  memcpy(&u, &value, 4);
  const uint32_t sign = u >> 16 & 0x8000u;
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return {uint16_t(sign | 0x7e00u)};
  // Values from 65520 on round to infinity.
  if (u >= 0x477ff000u) return {uint16_t(sign | 0x7c00u)};
  if (u < 0x38800000u) {  // denormal half: adding 0.5 leaves the rounded bits at the bottom
    float f;
    memcpy(&f, &u, 4);
    f += 0.5f;
    memcpy(&u, &f, 4);
    return {uint16_t(sign | (u - 0x3f000000u))};
  }
  return {uint16_t(sign | (u - 0x38000000u + 0xfffu + (u >> 13 & 1u)) >> 13)};
}

FN Vec<float> load_io(const fp16* p) {
  float lanes[kFloats];
  for (int i = 0; i < kFloats; ++i) lanes[i] = to_float(p[i]);
  return load(lanes);
}
FN void store_io(fp16* p, Vec<float> v) {
  float lanes[kFloats];
  store(lanes, v);
  for (int i = 0; i < kFloats; ++i) p[i] = to_half(lanes[i]);
}
#endif

#if defined(__AVX512F__)
// Masked loads and stores of the first `count` lanes: a copy of a size known only at run time takes
// several times as long, and is read back before its bytes have left the store buffer.
FN uint16_t first_lanes(int count) { return uint16_t((1u << count) - 1); }
FN Vec<float> load_first(const float* p, int count) {
  return (Vec<float>::Raw)_mm512_maskz_loadu_ps(first_lanes(count), p);
}
FN Vec<double> load_first(const double* p, int count) {
  return (Vec<double>::Raw)_mm512_maskz_loadu_pd(__mmask8(first_lanes(count)), p);
}
FN Vec<float> load_first(const fp16* p, int count) {
  return (Vec<float>::Raw)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(count), p));
}
FN Vec<float> load_first(const bf16* p, int count) {
  const __m256i bits = _mm256_maskz_loadu_epi16(first_lanes(count), p);
  return (Vec<float>::Raw)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
}
FN void store_first(float* p, Vec<float> v, int count) {
  _mm512_mask_storeu_ps(p, first_lanes(count), (__m512)v.raw);
}
FN void store_first(double* p, Vec<double> v, int count) {
  _mm512_mask_storeu_pd(p, __mmask8(first_lanes(count)), (__m512d)v.raw);
}
template <typename IO>
FN void store_first(IO* p, Vec<float> v, int count) {
  __m256i bits;
  store_io((IO*)&bits, v);
  _mm256_mask_storeu_epi16(p, first_lanes(count), bits);
}
#else
template <typename IO>
FN Vec<State<IO>> load_first(const IO* p, int count) {
  IO lanes[Vec<State<IO>>::kWidth] = {};
  memcpy(lanes, p, count * sizeof(IO));
  return load_io(lanes);
}
template <typename IO>
FN void store_first(IO* p, Vec<State<IO>> v, int count) {
  IO lanes[Vec<State<IO>>::kWidth];
  store_io(lanes, v);
  memcpy(p, lanes, count * sizeof(IO));
}
#endif

// Loads the first `count` lanes and sets the others to 0. The type Whole states at compile time
// that `count` is the full width.
template <bool Whole, typename IO>
FN Vec<State<IO>> load_part(const IO* p, int count) {
  if constexpr (Whole) {
    return load_io(p);
  } else {
    return load_first(p, count);
  }
}

template <bool Whole, typename IO>
FN void store_part(IO* p, Vec<State<IO>> v, int count) {
  if constexpr (Whole) {
    store_io(p, v);
  } else {
    store_first(p, v, count);
  }
}

}  // namespace flashcell::FLASHCELL_ISA
