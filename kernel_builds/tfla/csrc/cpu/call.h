// How ops.cpp runs an op on the CPU. cuda/call.h has the same functions.
#pragma once
#include "engine.h"
#include "torch_host.h"

namespace flashcell {

inline const Backend& backend() {
  static const Backend* const engines[] = {&baseline::kBackend, &avx2::kBackend, &avx512::kBackend};
  static const Backend& chosen = *engines[int(select_isa())];
  return chosen;
}

inline void run(const ForwardParams& params, Dtype dtype, const Tensor& /*like*/) {
  backend().forward(dtype, params, host());
}

inline void run(const BackwardParams& params, Dtype dtype, const Tensor& /*like*/) {
  backend().backward(dtype, params, host());
}

inline void run(const StepParams& params, Dtype dtype, const Tensor& /*like*/) {
  backend().step(dtype, params, host());
}

}  // namespace flashcell
