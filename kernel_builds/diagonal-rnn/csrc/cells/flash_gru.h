// z, r = sigmoid(a h + x)       c = tanh(a_c (h r) + x_c)                  (arXiv 2510.21450)
// h' = (1 - z) h + z c
#pragma once
#include "common/cells/math.h"

namespace flashcell {

struct FlashGru {
  static constexpr const char* kName = "flash_gru";
  enum Gate { Z, R, C, kGates };
  enum State { H, kStates };
  static constexpr int kWeights = 3;  // rows of `a`, one for each gate

  template <typename V>
  // The gates, and in d[g] the gradient of h' with respect to the pre-activation of gate g.
  struct Gates {
    V z, r, c, d[kGates];
    FN Gates(const V (&x)[kGates], const V (&w)[kWeights], V h) {
      z = sigmoid(w[Z] * h + x[Z]), r = sigmoid(w[R] * h + x[R]);
      c = tanh(w[C] * (h * r) + x[C]);
      d[Z] = (c - h) * d_sigmoid(z), d[C] = z * d_tanh(c);
      d[R] = d[C] * w[C] * h * d_sigmoid(r);
    }
    FN V slope(const V (&w)[kWeights]) const {  // derivative of h' with respect to h
      return (V(1) - z) + w[Z] * d[Z] + w[R] * d[R] + w[C] * r * d[C];
    }
  };

  template <typename V>
  static FN void forward(const V (&x)[kGates], const V (&w)[kWeights], const V (&s)[kStates],
                         V (&next)[kStates]) {
    const Gates<V> g(x, w, s[H]);
    next[H] = s[H] + g.z * (g.c - s[H]);
  }

  // jacobian[i][j] is the derivative of next[i] with respect to s[j].
  template <typename V>
  static FN void jacobian(const V (&x)[kGates], const V (&w)[kWeights], const V (&s)[kStates],
                          V (&next)[kStates], V (&jacobian)[kStates][kStates]) {
    const Gates<V> g(x, w, s[H]);
    next[H] = s[H] + g.z * (g.c - s[H]);
    jacobian[H][H] = g.slope(w);
  }

  // d_state is the gradient of `next` on entry and of `s` on return; dw is accumulated.
  template <typename V>
  static FN void backward(const V (&x)[kGates], const V (&w)[kWeights], const V (&s)[kStates],
                          V (&d_state)[kStates], V (&dx)[kGates], V (&dw)[kWeights]) {
    const Gates<V> g(x, w, s[H]);
    for (int k = 0; k < kGates; ++k) dx[k] = d_state[H] * g.d[k];
    dw[Z] += dx[Z] * s[H], dw[R] += dx[R] * s[H], dw[C] += dx[C] * (s[H] * g.r);
    d_state[H] = d_state[H] * g.slope(w);
  }
};

}  // namespace flashcell
