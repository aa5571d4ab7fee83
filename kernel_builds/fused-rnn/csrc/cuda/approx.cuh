// The scalar types of cells on CUDA: fp32 values whose non-linearities take a few hardware
// instructions. kCoarse, for bf16, uses tanh.approx: one instruction, within 2^-11, a quarter of a
// bf16 rounding. kFast, for fp16 and tf32, uses ex2 and rcp: within 2^-22 of 1. kFull, for exact
// fp32 in the fma and wide engines, uses CUDA's exp and tanh, and a division within 2 ulp, because
// the correctly rounded one takes four times as many instructions. NOTEBOOK.md, "On CUDA", has
// their effect on the error of h against fp64. The other engines compute exact fp32 in float.
#pragma once
#include "../cells/all.h"
#include "common/cuda/device.cuh"

namespace flashcell {

enum class Accuracy { kCoarse, kFast, kFull };

template <Accuracy kAccuracy>
struct Approx {
  float v;
  Approx() = default;
  FN Approx(float x) : v(x) {}

  friend FN Approx operator+(Approx a, Approx b) { return a.v + b.v; }
  friend FN Approx operator-(Approx a, Approx b) { return a.v - b.v; }
  friend FN Approx operator-(Approx a) { return -a.v; }
  friend FN Approx operator*(Approx a, Approx b) { return a.v * b.v; }
  friend FN Approx& operator+=(Approx& a, Approx b) { return a = a + b; }
  friend FN bool operator<(Approx a, Approx b) { return a.v < b.v; }
  friend FN bool operator<=(Approx a, Approx b) { return a.v <= b.v; }
  friend FN bool operator==(Approx a, Approx b) { return a.v == b.v; }
  friend FN bool operator!=(Approx a, Approx b) { return a.v != b.v; }
  friend FN Approx select(bool take_a, Approx a, Approx b) { return take_a ? a : b; }
};

using Coarse = Approx<Accuracy::kCoarse>;
using Fast = Approx<Accuracy::kFast>;
using Full = Approx<Accuracy::kFull>;

template <Accuracy kAccuracy>
DEVICE Approx<kAccuracy> operator/(Approx<kAccuracy> a, Approx<kAccuracy> b) {
  return __fdividef(a.v, b.v);
}
template <Accuracy kAccuracy>
DEVICE Approx<kAccuracy> exp(Approx<kAccuracy> x) {
  return kAccuracy == Accuracy::kFull ? expf(x.v) : __expf(x.v);
}
template <Accuracy kAccuracy>
DEVICE Approx<kAccuracy> log1p(Approx<kAccuracy> x) {
  return kAccuracy == Accuracy::kFull ? log1pf(x.v) : __logf(1.0f + x.v);
}
DEVICE Coarse tanh(Coarse x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x.v));
  return y;
}
DEVICE Coarse sigmoid(Coarse x) { return fmaf(0.5f, tanh(Coarse(0.5f * x.v)).v, 0.5f); }

// One instruction each; results below 2^-126 become 0.
DEVICE float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float fast_inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
constexpr float kLog2E = 1.44269504f;
DEVICE Fast sigmoid(Fast x) { return fast_inverse(1.0f + fast_exp2(-kLog2E * x.v)); }
// Where e^2x overflows, 1 - 2 / inf is 1, as it should be.
DEVICE Fast tanh(Fast x) {
  return fmaf(-2.0f, fast_inverse(1.0f + fast_exp2(2 * kLog2E * x.v)), 1.0f);
}
DEVICE Full tanh(Full x) { return tanhf(x.v); }
// The exponent is never positive, so the relative error of the power is at most that of its
// exponent, and what is flushed to 0 is less than 2^-126.
DEVICE Full sigmoid(Full x) {
  const float e = fast_exp2(-kLog2E * fabsf(x.v));
  return (x.v < 0 ? e : 1.0f) * fast_inverse(1.0f + e);
}

}  // namespace flashcell
