// The scalar types of cells on tensor cores: fp32 values whose non-linearities take a few hardware
// instructions. Approx<true>, for bf16, uses tanh.approx: one instruction, within 2^-11, a quarter
// of a bf16 rounding. Approx<false>, for fp16 and tf32, uses ex2 and rcp: within 2^-22 of 1.
// NOTEBOOK.md, "On CUDA", has their effect on the error of h against fp64. Exact fp32 computes in
// float.
#pragma once
#include "../cells/all.h"
#include "common/cuda/device.cuh"

namespace flashcell {

template <bool kCoarse>
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

template <bool kCoarse>
DEVICE Approx<kCoarse> operator/(Approx<kCoarse> a, Approx<kCoarse> b) {
  return __fdividef(a.v, b.v);
}
template <bool kCoarse>
DEVICE Approx<kCoarse> exp(Approx<kCoarse> x) {
  return __expf(x.v);
}
template <bool kCoarse>
DEVICE Approx<kCoarse> log1p(Approx<kCoarse> x) {
  return __logf(1.0f + x.v);
}
DEVICE Approx<true> tanh(Approx<true> x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x.v));
  return y;
}
DEVICE Approx<true> sigmoid(Approx<true> x) {
  return fmaf(0.5f, tanh(Approx<true>(0.5f * x.v)).v, 0.5f);
}
DEVICE Approx<false> sigmoid(Approx<false> x) { return __fdividef(1.0f, 1.0f + __expf(-x.v)); }
// Where e^2x overflows, 1 - 2 / inf is 1, as it should be.
DEVICE Approx<false> tanh(Approx<false> x) {
  return 1.0f - __fdividef(2.0f, 1.0f + __expf(2.0f * x.v));
}

}  // namespace flashcell
