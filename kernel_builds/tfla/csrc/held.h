// Held steps: nothing that they hold may matter, but the products multiply it by 0, and 0 NaN is
// NaN. Included behind the call.h of the device.
#pragma once
#include <array>

#include "common/torch/checks.h"

namespace flashcell {

#if !defined(CUDA_KERNEL)
// Of rows [H, width] of x [B, T, H, width], the last stride of which is 1.
template <typename Bits>
bool has_finite_held(const Tensor& x, const uint8_t* hold, Bits exponent) {
  const Bits* data = static_cast<const Bits*>(x.const_data_ptr());
  const int64_t T = x.size(1), H = x.size(2), width = x.size(3);
  for (int64_t row = 0; row < x.size(0) * T; ++row) {
    if (!hold[row]) continue;
    for (int64_t h = 0; h < H; ++h) {
      const Bits* from = data + row / T * x.stride(0) + row % T * x.stride(1) + h * x.stride(2);
      bool is_finite = true;
      for (int64_t i = 0; i < width; ++i) is_finite &= (from[i] & exponent) != exponent;
      if (!is_finite) return false;
    }
  }
  return true;
}

inline bool may_be_read(const Tensor& x, const Tensor& hold) {
  const auto* held = static_cast<const uint8_t*>(hold.const_data_ptr());
  switch (x.scalar_type()) {
    case ScalarType::Double:
      return has_finite_held<uint64_t>(x, held, 0x7ff0000000000000);
    case ScalarType::Float:
      return has_finite_held<uint32_t>(x, held, 0x7f800000);
    case ScalarType::BFloat16:
      return has_finite_held<uint16_t>(x, held, 0x7f80);
    default:
      return has_finite_held<uint16_t>(x, held, 0x7c00);
  }
}
#else
// The host does not wait to find out.
inline bool may_be_read(const Tensor&, const Tensor&) { return false; }
#endif

// x [B, T, H, width] as the engine reads it, or a copy with zeros at held steps.
inline Tensor without_held(const Tensor& x, const OptionalTensor& hold) {
  if (!hold || x.numel() == 0 || may_be_read(x, *hold)) return x;
  using namespace torch::stable;
  const Tensor mask = unsqueeze(unsqueeze(*hold, 2), 3);
  const Tensor zero = new_zeros(x, {});
  std::array<StableIValue, 3> stack{detail::from(mask), detail::from(zero), detail::from(x)};
  // Not masked_fill, which reads a value on the GPU from the host and so fits in no graph.
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::where", "self", stack.data(), TORCH_ABI_VERSION));
  return input(detail::to<Tensor>(stack[0]));
}

}  // namespace flashcell
