// i, f, o = sigmoid(x + r)      g = tanh(x + r)          (torch.nn.LSTM; bias is inside x)
// c' = f c + i g                h' = o tanh(c')
#pragma once
#include "bound.h"

namespace flashcell {

struct Lstm {
  static constexpr const char* kName = "lstm";
  enum Gate { I, F, G, O, kGates };
  enum State { H, C, kStates };
  enum Saved { SI, SF, SG, SO, SC, kSaved };  // SC is c before the step
  static constexpr int kBias = kGates;
  static constexpr int kGradStates = kStates;
  static constexpr bool kSplitGrad = false;  // dr equals dx
  static constexpr bool kReadsH = false;     // a step reads h in the product alone
  static constexpr bool kHasBound = true;    // of c

  template <typename V, typename Bounds = NoBound>
  static FN void forward(const V (&x)[kGates], const V (&r)[kGates], const V (&s)[kStates],
                         V (&next)[kStates], V (&saved)[kSaved], const Bounds& bound = {}) {
    const V i = sigmoid(x[I] + r[I]), f = sigmoid(x[F] + r[F]), o = sigmoid(x[O] + r[O]);
    const V g = tanh(x[G] + r[G]);
    next[C] = bound.clip(f * s[C] + i * g);
    next[H] = o * tanh(next[C]);
    saved[SI] = i, saved[SF] = f, saved[SG] = g, saved[SO] = o, saved[SC] = s[C];
  }

  // d_state is the gradient of `next` on entry; on return it is the gradient of `s`, without the
  // recurrent term weight^T dr.
  template <typename V, typename Bounds = NoBound>
  static FN void backward(const V (&saved)[kSaved], V (&d_state)[kStates], V (&dx)[kGates],
                          V (&dr)[kGates], const Bounds& bound = {}) {
    const V i = saved[SI], f = saved[SF], g = saved[SG], o = saved[SO], c = saved[SC];
    const V sum = f * c + i * g, tc = tanh(bound.clip(sum));
    const V dc = bound.gradient(sum, d_state[C] + d_state[H] * o * d_tanh(tc));
    dx[I] = dc * g * d_sigmoid(i);
    dx[F] = dc * c * d_sigmoid(f);
    dx[G] = dc * i * d_tanh(g);
    dx[O] = d_state[H] * tc * d_sigmoid(o);
    for (int k = 0; k < kGates; ++k) dr[k] = dx[k];
    d_state[H] = V(0), d_state[C] = dc * f;
  }
};

}  // namespace flashcell
