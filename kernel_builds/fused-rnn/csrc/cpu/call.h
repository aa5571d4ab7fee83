// Runs the sequence ops on the CPU for ops.cpp. cuda/call.h has functions of the same names.
#pragma once
#include "common/torch/cpu.h"
#include "engine.h"

namespace flashcell {

inline ScalarType saved_dtype(const Tensor& x) { return state_dtype(x); }

inline bool takes_bias_in(ScalarType, int64_t) { return false; }

inline Tensor input(const Tensor& x) {  // x in the layout that the engine reads
  return x.stride(4) != 1 && x.size(4) > 1 ? torch::stable::contiguous(x) : x;
}

inline const Backend& backend() {
#define FLASHCELL_ENGINE(level) &level::kBackend,
  static const Backend* const engines[] = {FLASHCELL_LEVELS(FLASHCELL_ENGINE)};
#undef FLASHCELL_ENGINE
  static const Backend& chosen = *engines[select_level()];
  return chosen;
}

template <typename Cell>
bool multiplies_input(const ForwardParams&, int64_t, Dtype, bool) {
  return false;
}

template <typename Cell>
bool writes_strided_h(const ForwardParams&, Dtype, bool, const Tensor&) {
  return false;
}

template <typename Cell>
void run(const ForwardParams& params, Dtype dtype, bool /*tf32*/, const Tensor& /*like*/) {
  backend().forward(AllCells::index_of<Cell>(), dtype, params, host());
}

template <typename Cell>
void run(const BackwardParams& params, Dtype dtype, bool /*tf32*/, const Tensor& /*like*/) {
  backend().backward(AllCells::index_of<Cell>(), dtype, params, host());
}

}  // namespace flashcell
