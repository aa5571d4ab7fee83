// f = sigmoid(x + r)            n = tanh(x_n + f (weight_n h + b_nh))   (minimal gated unit)
// h' = (1 - f) h + f n
#pragma once
#include "common/cells/math.h"

namespace flashcell {

struct Mgu {
  static constexpr const char* kName = "mgu";
  enum Gate { F, N, kGates };
  enum State { H, kStates };
  enum Saved { SF, SN, SP, SH, kSaved };
  static constexpr int kBias = kGates + 1;
  static constexpr int kGradStates = kStates;
  static constexpr bool kSplitGrad = true;

  template <typename V>
  static FN void forward(const V (&x)[kGates], const V (&r)[kGates], const V (&s)[kStates],
                         V (&next)[kStates], V (&saved)[kSaved]) {
    const V f = sigmoid(x[F] + r[F]), n = tanh(x[N] + f * r[N]);
    next[H] = s[H] + f * (n - s[H]);
    saved[SF] = f, saved[SN] = n, saved[SP] = r[N], saved[SH] = s[H];
  }

  template <typename V>
  static FN void backward(const V (&saved)[kSaved], V (&d_state)[kStates], V (&dx)[kGates],
                          V (&dr)[kGates]) {
    const V f = saved[SF], n = saved[SN], dh = d_state[H];
    dx[N] = dh * f * d_tanh(n);
    dx[F] = (dh * (n - saved[SH]) + dx[N] * saved[SP]) * d_sigmoid(f);
    dr[F] = dx[F], dr[N] = dx[N] * f;
    d_state[H] = dh * (V(1) - f);
  }
};

}  // namespace flashcell
