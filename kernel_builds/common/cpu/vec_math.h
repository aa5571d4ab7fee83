// exp, tanh, log1p for Vec<float> and Vec<double>, to 1-3 ulp; infinities and NaN as in libm.
#pragma once
#include "common/cpu/vec.h"

namespace flashcell::FLASHCELL_ISA {

template <typename T>
struct Real;
template <>
struct Real<float> {
  using Int = int32_t;
  static constexpr int kMantissa = 23, kBias = 127;
  static constexpr float kShifter = 0x1.8p23f;  // adding it rounds to an integer in the low bits
  static constexpr float kLn2High = 0x1.62e4p-1f, kLn2Low = 0x1.7f7d1cp-20f;  // high * n is exact
  // Results beyond are exactly 0 and infinity.
  static constexpr float kExpMin = -105.f, kExpMax = 89.f;
  static constexpr float kTanhMax = 10.f;  // from here on tanh rounds to 1
  static constexpr int kExpTerms = 7;      // 0.347^8 / 8! < 2^-27
  static constexpr int kLog1pTerms = 8;    // 9^-8 / 17 < 2^-29
};
template <>
struct Real<double> {
  using Int = int64_t;
  static constexpr int kMantissa = 52, kBias = 1023;
  static constexpr double kShifter = 0x1.8p52;
  static constexpr double kLn2High = 0x1.62e42fee00000p-1, kLn2Low = 0x1.a39ef35793c76p-33;
  static constexpr double kExpMin = -746., kExpMax = 710.;
  static constexpr double kTanhMax = 20.;
  static constexpr int kExpTerms = 13;    // 0.347^14 / 14! < 2^-57
  static constexpr int kLog1pTerms = 17;  // 9^-17 / 35 < 2^-58
};

// Writes x as n ln 2 + r with |r| <= ln 2 / 2. Returns e^r - 1, and n (an integer) by reference.
template <typename T>
FN Vec<T> expm1_reduced(Vec<T> x, Vec<T>* n) {
  using V = Vec<T>;
  const V shifted = x * V(T(1.44269504088896340736)) + V(Real<T>::kShifter);
  *n = shifted - V(Real<T>::kShifter);
  const V r = (x - *n * V(Real<T>::kLn2High)) - *n * V(Real<T>::kLn2Low);
  T factorial = 1;
  T inverse[Real<T>::kExpTerms + 1];
#pragma GCC unroll 16
  for (int k = 1; k <= Real<T>::kExpTerms; ++k) factorial *= T(k), inverse[k] = T(1) / factorial;
  V p = V(inverse[Real<T>::kExpTerms]);
#pragma GCC unroll 16
  for (int k = Real<T>::kExpTerms - 1; k >= 2; --k) p = p * r + V(inverse[k]);
  return r + r * r * p;
}

template <typename T>
FN Vec<T> power_of_two(Vec<T> n) {  // requires integer n with a normal 2^n
  using Int = typename Lane<T>::Int;
  const Int biased = (Int)(n + Vec<T>(Real<T>::kShifter + T(Real<T>::kBias))).raw;
  return (typename Lane<T>::Raw)(biased << Real<T>::kMantissa);
}

// Returns e 2^n for any integer n.
template <typename T>
FN Vec<T> scale_by_power_of_two(Vec<T> e, Vec<T> n) {
  // Multiply by two factors: 2^n itself may be infinite or denormal where the product is not.
  const Vec<T> half = (n * Vec<T>(T(0.5)) + Vec<T>(Real<T>::kShifter)) - Vec<T>(Real<T>::kShifter);
  return e * power_of_two(half) * power_of_two(n - half);
}
#if defined(__AVX512F__)
template <>
FN Vec<float> scale_by_power_of_two(Vec<float> e, Vec<float> n) {
  return (Vec<float>::Raw)_mm512_scalef_ps((__m512)e.raw, (__m512)n.raw);
}
#endif

template <typename T>
FN Vec<T> exp(Vec<T> x) {
  using V = Vec<T>;
  x = at_most(V(Real<T>::kExpMax), at_least(V(Real<T>::kExpMin), x));
  V n;
  const V e = expm1_reduced(x, &n) + V(1);
  return scale_by_power_of_two(e, n);
}

// With m = e^(2|x|) - 1, tanh|x| = m / (m + 2), which is accurate for small x as well.
template <typename T>
FN Vec<T> tanh(Vec<T> x) {
  using V = Vec<T>;
  const V y = at_most(V(Real<T>::kTanhMax), absolute(x)) * V(2);
  V n;
  const V p = expm1_reduced(y, &n), scale = power_of_two(n);
  const V m = scale * p + (scale - V(1));
  return with_sign(m / (m + V(2)), x);
}

// Computes log(1 + x) for x in [0, 1] as 2 atanh(s), where s = x / (2 + x) <= 1/3.
template <typename T>
FN Vec<T> log1p(Vec<T> x) {
  using V = Vec<T>;
  const V s = x / (V(2) + x), z = s * s;
  V p = V(0);
#pragma GCC unroll 20
  for (int k = Real<T>::kLog1pTerms; k >= 1; --k) p = (p + V(T(1) / T(2 * k + 1))) * z;
  return V(2) * (s + s * p);
}

}  // namespace flashcell::FLASHCELL_ISA
