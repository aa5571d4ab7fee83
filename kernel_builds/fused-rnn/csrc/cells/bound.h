// Bounds on the state that a step adds up: none, or [-most, most] (clip_state), applied before
// anything reads the state. Gradients are those of a clamp, which pass inside of it alone, but for
// NaN, where they pass too.
#pragma once
#include <cmath>

#include "common/cells/math.h"

namespace flashcell {

struct NoBound {
  template <typename V>
  FN V clip(V v) const {
    return v;
  }
  template <typename V>  // the gradient of v, given that of clip(v)
  FN V gradient(V, V d) const {
    return d;
  }
};

template <typename V>
struct Bound {
  V most;

  FN V clip(V v) const { return select(most < v, most, select(v < -most, -most, v)); }  // keeps NaN
  FN V gradient(V v, V d) const { return select(most < absolute(v), V(0), d); }
};

// For code that is compiled once, for calls with a bound and without: `most` is 0 for none.
template <typename V>
FN Bound<V> bound_or_none(double most) {
  return {V(most > 0 ? float(most) : INFINITY)};
}

// Whether a cell takes a bound: its forward and backward have one more argument then.
template <typename Cell>
constexpr bool kHasBound = [] {
  if constexpr (requires { Cell::kHasBound; }) {
    return Cell::kHasBound;
  } else {
    return false;
  }
}();

}  // namespace flashcell
