// h' = act(x + r),  act = tanh or relu                                     (torch.nn.RNN)
#pragma once
#include "bound.h"

namespace flashcell {

struct Tanh {
  static constexpr const char* kName = "rnn_tanh";
  template <typename V>
  static FN V value(V x) {
    return tanh(x);
  }
  template <typename V>
  static FN V gradient(V y, V dy) {
    return dy * d_tanh(y);
  }
};

struct Relu {  // NaN passes through forward and backward, as in torch
  static constexpr const char* kName = "rnn_relu";
  template <typename V>
  static FN V value(V x) {
    return select(x <= V(0), V(0), x);
  }
  template <typename V>
  static FN V gradient(V y, V dy) {
    return select(y <= V(0), V(0), dy);
  }
};

template <typename Activation>
struct Rnn {
  static constexpr const char* kName = Activation::kName;
  enum Gate { A, kGates };
  enum State { H, kStates };
  enum Saved { SH, kSaved };  // SH is h' before any bound
  static constexpr int kBias = kGates;
  static constexpr int kGradStates = kStates;
  static constexpr bool kSplitGrad = false;
  static constexpr bool kReadsH = false;   // a step reads h in the product alone
  static constexpr bool kHasBound = true;  // of h

  template <typename V, typename Bounds = NoBound>
  static FN void forward(const V (&x)[kGates], const V (&r)[kGates], const V (&)[kStates],
                         V (&next)[kStates], V (&saved)[kSaved], const Bounds& bound = {}) {
    next[H] = bound.clip(saved[SH] = Activation::value(x[A] + r[A]));
  }

  template <typename V, typename Bounds = NoBound>
  static FN void backward(const V (&saved)[kSaved], V (&d_state)[kStates], V (&dx)[kGates],
                          V (&dr)[kGates], const Bounds& bound = {}) {
    dx[A] = dr[A] = Activation::gradient(saved[SH], bound.gradient(saved[SH], d_state[H]));
    d_state[H] = V(0);
  }
};

using RnnTanh = Rnn<Tanh>;
using RnnRelu = Rnn<Relu>;

}  // namespace flashcell
