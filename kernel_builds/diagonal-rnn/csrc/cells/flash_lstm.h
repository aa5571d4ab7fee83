// f = sigmoid(a_f h + p_f c + x_f)     z = tanh(a_z h + x_z)               (arXiv 2510.21450)
// c' = f c + (1 - f) z   o = sigmoid(a_o h + p_o c' + x_o)   h' = o tanh(c')
#pragma once
#include "common/cells/math.h"

namespace flashcell {

struct FlashLstm {
  static constexpr const char* kName = "flash_lstm";
  enum Gate { F, O, Z, kGates };
  enum State { H, C, kStates };
  enum Weight { AF, AO, AZ, PF, PO, kWeights };

  template <typename V>
  struct Gates {
    V f, z, c, o, t;                               // c is c', t is tanh(c')
    V c_along_f, c_along_z, h_along_o, h_along_c;  // derivatives; h_along_c also through o
    FN Gates(const V (&x)[kGates], const V (&w)[kWeights], const V (&s)[kStates]) {
      f = sigmoid(w[AF] * s[H] + w[PF] * s[C] + x[F]), z = tanh(w[AZ] * s[H] + x[Z]);
      c = z + f * (s[C] - z);
      o = sigmoid(w[AO] * s[H] + w[PO] * c + x[O]), t = tanh(c);
      c_along_f = (s[C] - z) * d_sigmoid(f), c_along_z = (V(1) - f) * d_tanh(z);
      h_along_o = t * d_sigmoid(o), h_along_c = o * d_tanh(t) + h_along_o * w[PO];
    }
    FN V along_h(const V (&w)[kWeights]) const { return c_along_f * w[AF] + c_along_z * w[AZ]; }
    FN V along_c(const V (&w)[kWeights]) const { return f + c_along_f * w[PF]; }
  };

  template <typename V>
  static FN void forward(const V (&x)[kGates], const V (&w)[kWeights], const V (&s)[kStates],
                         V (&next)[kStates]) {
    const Gates<V> g(x, w, s);
    next[H] = g.o * g.t, next[C] = g.c;
  }

  // jacobian[i][j] is the derivative of next[i] with respect to s[j].
  template <typename V>
  static FN void jacobian(const V (&x)[kGates], const V (&w)[kWeights], const V (&s)[kStates],
                          V (&next)[kStates], V (&jacobian)[kStates][kStates]) {
    const Gates<V> g(x, w, s);
    next[H] = g.o * g.t, next[C] = g.c;
    jacobian[C][H] = g.along_h(w), jacobian[C][C] = g.along_c(w);
    jacobian[H][H] = g.h_along_c * jacobian[C][H] + g.h_along_o * w[AO];
    jacobian[H][C] = g.h_along_c * jacobian[C][C];
  }

  // d_state is the gradient of `next` on entry and of `s` on return; dw is accumulated.
  template <typename V>
  static FN void backward(const V (&x)[kGates], const V (&w)[kWeights], const V (&s)[kStates],
                          V (&d_state)[kStates], V (&dx)[kGates], V (&dw)[kWeights]) {
    const Gates<V> g(x, w, s);
    const V dc = d_state[C] + d_state[H] * g.h_along_c;
    dx[F] = dc * g.c_along_f, dx[Z] = dc * g.c_along_z, dx[O] = d_state[H] * g.h_along_o;
    dw[AF] += dx[F] * s[H], dw[AO] += dx[O] * s[H], dw[AZ] += dx[Z] * s[H];
    dw[PF] += dx[F] * s[C], dw[PO] += dx[O] * g.c;
    d_state[H] = dc * g.along_h(w) + dx[O] * w[AO], d_state[C] = dc * g.along_c(w);
  }
};

}  // namespace flashcell
