// Runs the ops on the CPU for ops.cpp. cuda/call.h has functions of the same names.
#pragma once
#include "common/torch/cpu.h"
#include "engine.h"

namespace flashcell {

inline Tensor input(const Tensor& x) {  // x in the layout that the engine reads
  const int64_t row = x.dim() - 1;
  return x.stride(row) != 1 && x.size(row) > 1 ? torch::stable::contiguous(x) : x;
}

inline const Backend& backend() {
#define FLASHCELL_ENGINE(level) &level::kBackend,
  static const Backend* const engines[] = {FLASHCELL_LEVELS(FLASHCELL_ENGINE)};
#undef FLASHCELL_ENGINE
  static const Backend& chosen = *engines[select_level()];
  return chosen;
}

inline void check_method(const SequenceParams& params) {
  STD_TORCH_CHECK(params.method == Method::kSequential, "method must be sequential on the CPU");
}

template <typename Cell>
void run(const ForwardParams& params, Dtype dtype, const Tensor& /*like*/) {
  check_method(params);
  backend().forward(AllCells::index_of<Cell>(), dtype, params, host());
}

template <typename Cell>
void run(const BackwardParams& params, Dtype dtype, const Tensor& /*like*/) {
  check_method(params);
  backend().backward(AllCells::index_of<Cell>(), dtype, params, host());
}

inline void run(const ConvStepParams& params, Dtype dtype, const Tensor& /*like*/) {
  backend().conv_step(dtype, params, host());
}

template <typename Cell>
void run(const MixStepParams& params, Dtype dtype, const Tensor& /*like*/) {
  backend().mix_step(AllCells::index_of<Cell>(), dtype, params, host());
}

inline void run(const ScanForwardParams& params, Dtype dtype, const Tensor& /*like*/) {
  backend().scan_forward(dtype, params, host());
}

inline void run(const ScanBackwardParams& params, Dtype dtype, const Tensor& /*like*/) {
  backend().scan_backward(dtype, params, host());
}

}  // namespace flashcell
