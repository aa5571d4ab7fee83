// Runs the ops on the CPU for ops.cpp. cuda/call.h has functions of the same names.
#pragma once
#include "common/torch/cpu.h"
#include "engine.h"

namespace flashcell {

inline const Backend& backend() {
#define FLASHCELL_ENGINE(level) &level::kBackend,
  static const Backend* const engines[] = {FLASHCELL_LEVELS(FLASHCELL_ENGINE)};
#undef FLASHCELL_ENGINE
  static const Backend& chosen = *engines[select_level()];
  return chosen;
}

// Returns x in the layout that the engine reads: rows are contiguous along the width, other
// dimensions may have any stride.
inline Tensor input(const Tensor& x) {
  return x.stride(x.dim() - 1) == 1 ? x : torch::stable::contiguous(x);
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

inline void run(const LinearStepParams& params, Dtype dtype, const Tensor& /*like*/) {
  backend().linear_step(dtype, params, host());
}

inline void run(const EpilogueParams& params, Dtype dtype, const Tensor& /*like*/) {
  backend().epilogue(dtype, params, host());
}

inline void run(const EpilogueBackwardParams& params, Dtype dtype, const Tensor& /*like*/) {
  backend().epilogue_backward(dtype, params, host());
}

}  // namespace flashcell
