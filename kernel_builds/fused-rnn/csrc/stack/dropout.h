// Dropout between layers, by torch's own ops.
#pragma once
#include "layers.h"

namespace flashcell {

inline Tensor drop(const Tensor& x, double probability, Tensor& mask) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(x),
                                    torch::stable::detail::from(probability),
                                    torch::stable::detail::from(std::optional<bool>(true))};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::native_dropout", "", stack.data(), TORCH_ABI_VERSION));
  mask = torch::stable::detail::to<Tensor>(stack[1]);
  return torch::stable::detail::to<Tensor>(stack[0]);
}

inline Tensor drop_gradient(const Tensor& dy, const Tensor& mask, double probability) {
  const double scale = probability < 1 ? 1 / (1 - probability) : 0;
  std::array<StableIValue, 3> stack{torch::stable::detail::from(dy),
                                    torch::stable::detail::from(mask),
                                    torch::stable::detail::from(scale)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::native_dropout_backward", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

}  // namespace flashcell
