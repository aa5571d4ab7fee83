// Scalar primitives of the cells (exp, tanh, log1p, select) and the functions built on them, for
// every value type V. A vector type V brings its own primitives, found by argument-dependent
// lookup.
#pragma once
#include <cmath>

// Functions marked FN are always inlined on the host: one translation unit for each instruction set
// compiles these headers, and the linker could merge an out-of-line copy across them.
#if defined(__CUDACC__)
#define FN __host__ __device__ __forceinline__
#else
#define FN inline __attribute__((always_inline))
#endif

namespace flashcell {

FN double exp(double x) { return ::exp(x); }
FN double tanh(double x) { return ::tanh(x); }
FN double log1p(double x) { return ::log1p(x); }
FN double select(bool take_a, double a, double b) { return take_a ? a : b; }
FN float exp(float x) { return ::expf(x); }
FN float tanh(float x) { return ::tanhf(x); }
FN float log1p(float x) { return ::log1pf(x); }
FN float select(bool take_a, float a, float b) { return take_a ? a : b; }

template <typename V>
FN V absolute(V x) {
  return select(x < V(0), -x, x);
}

// The exponent is never positive, so nothing overflows and both tails keep their relative accuracy.
template <typename V>
FN V sigmoid(V x) {
  const V e = exp(-absolute(x));
  return select(x < V(0), e, V(1)) / (V(1) + e);
}

template <typename V>
FN V logsigmoid(V x) {
  return select(x < V(0), x, V(0)) - log1p(exp(-absolute(x)));
}

// NaN in either argument propagates.
template <typename V>
FN V maximum(V a, V b) {
  return select(b != b, b, select(a < b, b, a));
}

// Each derivative is a function of the output y of the non-linearity, because y is what is saved.
template <typename V>
FN V d_sigmoid(V y) {
  return y * (V(1) - y);
}

template <typename V>
FN V d_tanh(V y) {
  return V(1) - y * y;
}

}  // namespace flashcell
