#pragma once
#include "cuda_runtime.h"

struct __half {
  _Float16 value;

  __half() = default;
  explicit __half(float x) : value(_Float16(x)) {}
  explicit operator float() const { return float(value); }
};
