// r, z = sigmoid(x + r)         n = tanh(x_n + r (weight_n h + b_nh))      (torch.nn.GRU)
// h' = (1 - z) n + z h
#pragma once
#include "bound.h"

namespace flashcell {

struct Gru {
  static constexpr const char* kName = "gru";
  enum Gate { R, Z, N, kGates };
  enum State { H, kStates };
  enum Saved { SR, SZ, SN, SP, SH, kSaved };  // SP = weight_n h + b_nh; SH is h before the step
  static constexpr int kBias = kGates + 1;    // the last row is b_nh, inside r[N]
  static constexpr int kGradStates = kStates;
  static constexpr bool kSplitGrad = true;  // dr[N] differs from dx[N]
  static constexpr bool kHasBound = true;   // of h

  template <typename V, typename Bounds = NoBound>
  static FN void forward(const V (&x)[kGates], const V (&r)[kGates], const V (&s)[kStates],
                         V (&next)[kStates], V (&saved)[kSaved], const Bounds& bound = {}) {
    const V reset = sigmoid(x[R] + r[R]), z = sigmoid(x[Z] + r[Z]);
    const V n = tanh(x[N] + reset * r[N]);
    next[H] = bound.clip(n + z * (s[H] - n));
    saved[SR] = reset, saved[SZ] = z, saved[SN] = n, saved[SP] = r[N], saved[SH] = s[H];
  }

  // d_state is the gradient of `next` on entry; on return it is the gradient of `s`, without the
  // recurrent term weight^T dr.
  template <typename V, typename Bounds = NoBound>
  static FN void backward(const V (&saved)[kSaved], V (&d_state)[kStates], V (&dx)[kGates],
                          V (&dr)[kGates], const Bounds& bound = {}) {
    const V reset = saved[SR], z = saved[SZ], n = saved[SN];
    const V dh = bound.gradient(n + z * (saved[SH] - n), d_state[H]);
    dx[N] = dh * (V(1) - z) * d_tanh(n);
    dx[R] = dx[N] * saved[SP] * d_sigmoid(reset);
    dx[Z] = dh * (saved[SH] - n) * d_sigmoid(z);
    dr[R] = dx[R], dr[Z] = dx[Z], dr[N] = dx[N] * reset;
    d_state[H] = dh * z;
  }
};

}  // namespace flashcell
