// lf = logsigmoid(x_f + r_f) + m     m' = i if n == 0 else max(i, lf)       (i = x_i + r_i)
// a = 0 if n == 0 else e^(lf - m')   b = e^(i - m')   z = tanh(x + r)   o = sigmoid(x + r)
// c' = a c + b z    n' = a n + b     h' = o c' / n'
// m only rescales c and n, h does not depend on it: gradients are taken at fixed m.
#pragma once
#include "common/cells/math.h"

namespace flashcell {

struct Slstm {
  static constexpr const char* kName = "slstm";
  enum Gate { I, F, Z, O, kGates };
  enum State { H, C, N, M, kStates };
  // SF = sigmoid(f); SC and SN are c and n before the step.
  enum Saved { SA, SB, SZ, SO, SF, SC, SN, kSaved };
  static constexpr int kBias = kGates;
  static constexpr int kGradStates = M;  // states from this one on carry no gradient
  static constexpr bool kSplitGrad = false;
  static constexpr bool kReadsH = false;  // a step reads h in the product alone

  template <typename V>
  static FN void forward(const V (&x)[kGates], const V (&r)[kGates], const V (&s)[kStates],
                         V (&next)[kStates], V (&saved)[kSaved]) {
    const V i = x[I] + r[I], f = x[F] + r[F], z = tanh(x[Z] + r[Z]), o = sigmoid(x[O] + r[O]);
    const V lf = logsigmoid(f) + s[M];
    const V m = select(s[N] == V(0), i, maximum(i, lf));
    const V a = select(s[N] == V(0), V(0), exp(lf - m)), b = exp(i - m);
    next[C] = a * s[C] + b * z, next[N] = a * s[N] + b, next[M] = m;
    next[H] = o * next[C] / next[N];
    saved[SA] = a, saved[SB] = b, saved[SZ] = z, saved[SO] = o, saved[SF] = sigmoid(f);
    saved[SC] = s[C], saved[SN] = s[N];
  }

  // d_state is the gradient of `next` on entry; on return it is the gradient of `s`, without the
  // recurrent term weight^T dr.
  template <typename V>
  static FN void backward(const V (&saved)[kSaved], V (&d_state)[kStates], V (&dx)[kGates],
                          V (&dr)[kGates]) {
    const V a = saved[SA], b = saved[SB], z = saved[SZ], o = saved[SO];
    const V n = a * saved[SN] + b, ratio = (a * saved[SC] + b * z) / n;
    const V dh = d_state[H];
    const V dc = d_state[C] + dh * o / n, dn = d_state[N] - dh * o * ratio / n;
    dx[I] = (dc * z + dn) * b;
    dx[F] = (dc * saved[SC] + dn * saved[SN]) * a * (V(1) - saved[SF]);
    dx[Z] = dc * b * d_tanh(z);
    dx[O] = dh * ratio * d_sigmoid(o);
    for (int k = 0; k < kGates; ++k) dr[k] = dx[k];
    d_state[H] = V(0), d_state[C] = dc * a, d_state[N] = dn * a, d_state[M] = V(0);
  }
};

}  // namespace flashcell
