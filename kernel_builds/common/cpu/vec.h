// Vec<T>: one register of T with operators. It is a generic GCC vector, so one source serves every
// instruction set; the width follows from the flags of the translation unit.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "common/cells/math.h"

namespace flashcell::FLASHCELL_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <typename T>
struct Lane;
template <>
struct Lane<float> {
  typedef float Raw __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Int __attribute__((vector_size(kVectorBytes)));
};
template <>
struct Lane<double> {
  typedef double Raw __attribute__((vector_size(kVectorBytes)));
  typedef int64_t Int __attribute__((vector_size(kVectorBytes)));
};

template <typename T>
struct Mask {
  typename Lane<T>::Int raw;
};

template <typename T>
struct Vec {
  using Raw = typename Lane<T>::Raw;
  static constexpr int kWidth = kVectorBytes / sizeof(T);
  Raw raw;

  Vec() = default;
  FN Vec(Raw r) : raw(r) {}
  FN Vec(T value) : raw(value - Raw{}) {}

  friend FN Vec operator+(Vec a, Vec b) { return a.raw + b.raw; }
  friend FN Vec operator-(Vec a, Vec b) { return a.raw - b.raw; }
  friend FN Vec operator*(Vec a, Vec b) { return a.raw * b.raw; }
  friend FN Vec operator/(Vec a, Vec b) { return a.raw / b.raw; }
  friend FN Vec operator-(Vec a) { return -a.raw; }
  friend FN Vec& operator+=(Vec& a, Vec b) { return a = a + b; }
  friend FN Mask<T> operator<(Vec a, Vec b) { return {a.raw < b.raw}; }
  friend FN Mask<T> operator<=(Vec a, Vec b) { return {a.raw <= b.raw}; }
  friend FN Mask<T> operator==(Vec a, Vec b) { return {a.raw == b.raw}; }
  friend FN Mask<T> operator!=(Vec a, Vec b) { return {a.raw != b.raw}; }
  friend FN Vec select(Mask<T> take_a, Vec a, Vec b) { return take_a.raw ? a.raw : b.raw; }
};

template <typename T>
FN Vec<T> load(const T* p) {
  typename Vec<T>::Raw raw;
  memcpy(&raw, p, sizeof raw);
  return raw;
}

template <typename T>
FN void store(T* p, Vec<T> v) {
  memcpy(p, &v.raw, sizeof v.raw);
}

// Returns |v|, and |v| with the sign of another value, by bit operations without comparisons.
template <typename T>
FN Vec<T> absolute(Vec<T> v) {
  using Int = typename Lane<T>::Int;
  return (typename Vec<T>::Raw)((Int)v.raw & ~(Int)(-Vec<T>(T(0))).raw);
}

template <typename T>
FN Vec<T> with_sign(Vec<T> magnitude, Vec<T> v) {
  using Int = typename Lane<T>::Int;
  return (typename Vec<T>::Raw)((Int)magnitude.raw | ((Int)v.raw & (Int)(-Vec<T>(T(0))).raw));
}

// Clamps v to [low, high]; NaN stays NaN.
template <typename T>
FN Vec<T> at_least(Vec<T> low, Vec<T> v) {
  return select(v < low, low, v);
}
template <typename T>
FN Vec<T> at_most(Vec<T> high, Vec<T> v) {
  return select(high < v, high, v);
}
#if defined(__AVX512F__)
template <>
FN Vec<float> at_least(Vec<float> low, Vec<float> v) {
  return (Vec<float>::Raw)_mm512_max_ps((__m512)low.raw, (__m512)v.raw);
}
template <>
FN Vec<float> at_most(Vec<float> high, Vec<float> v) {
  return (Vec<float>::Raw)_mm512_min_ps((__m512)high.raw, (__m512)v.raw);
}
#endif

// Sums the lanes in a fixed order: the upper half is added to the lower until one lane is left.
template <typename Raw>
FN auto fold_halves(Raw raw) {
  using T = decltype(raw[0] + 0);
  constexpr int kHalf = sizeof(Raw) / 2;
  if constexpr (kHalf == sizeof(T)) {
    return raw[0] + raw[1];
  } else {
    typedef T Half __attribute__((vector_size(kHalf)));
    struct {
      Half low, high;
    } halves;
    static_assert(sizeof halves == sizeof raw);
    memcpy(&halves, &raw, sizeof raw);
    return fold_halves(halves.low + halves.high);
  }
}

template <typename T>
FN T sum(Vec<T> v) {
  return fold_halves(v.raw);
}

}  // namespace flashcell::FLASHCELL_ISA
