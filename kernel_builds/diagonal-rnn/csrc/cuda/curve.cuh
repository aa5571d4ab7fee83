// sigmoid and tanh in two or three instructions. Both are affine functions of a common function,
// core:
//
//   sigmoid(x) = kSigmoid0 + kSigmoid1 core(kSigmoidIn x)
//   tanh(x) = kTanh0 + kTanh1 core(kTanhIn x)
//
// The scales can be folded into the weights before the loop over time, and the affine parts into
// neighbouring multiply-adds. NaN stays NaN; infinities give the limits.
#pragma once
#include "../cells/all.h"
#include "lane.cuh"

namespace flashcell {

template <bool kCoarse>
struct Curve;

// The precise core, from ex2 and rcp: within 2^-22 of 1.
template <>
struct Curve<false> {
  static constexpr float kLog2E = 1.4426950408889634f;
  static constexpr float kSigmoidIn = -kLog2E, kSigmoid0 = 0, kSigmoid1 = 1;
  static constexpr float kTanhIn = -2 * kLog2E, kTanh0 = -1, kTanh1 = 2;
  static DEVICE float core(float x) {
    float e, y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + e));
    return y;
  }
};

// The coarse core, tanh.approx: within 2^-11, a quarter of a bf16 rounding.
template <>
struct Curve<true> {
  static constexpr float kSigmoidIn = 0.5f, kSigmoid0 = 0.5f, kSigmoid1 = 0.5f;
  static constexpr float kTanhIn = 1, kTanh0 = 0, kTanh1 = 1;
  static DEVICE float core(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
};

// Returns offset + scale x; a constant offset of 0 costs nothing.
DEVICE float affine(float scale, float x, float offset) {
  return offset == 0 ? scale * x : fmaf(scale, x, offset);
}

// The scalar type in which the cells' equations are computed.
template <bool kCoarse>
struct Real {
  float v;
  Real() = default;
  FN Real(float x) : v(x) {}

  friend FN Real operator+(Real a, Real b) { return a.v + b.v; }
  friend FN Real operator-(Real a, Real b) { return a.v - b.v; }
  friend FN Real operator*(Real a, Real b) { return a.v * b.v; }
  friend FN Real& operator+=(Real& a, Real b) { return a = a + b; }
};
template <bool kCoarse>
DEVICE Real<kCoarse> sigmoid(Real<kCoarse> x) {
  using F = Curve<kCoarse>;
  return affine(F::kSigmoid1, F::core(F::kSigmoidIn * x.v), F::kSigmoid0);
}
template <bool kCoarse>
DEVICE Real<kCoarse> tanh(Real<kCoarse> x) {
  using F = Curve<kCoarse>;
  return affine(F::kTanh1, F::core(F::kTanhIn * x.v), F::kTanh0);
}

template <typename IO>
constexpr bool kIsCoarse = std::is_same_v<IO, cuda::bf16>;

}  // namespace flashcell
