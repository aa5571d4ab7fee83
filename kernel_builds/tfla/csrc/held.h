// Removes held steps from the products: their values must not matter, but products multiply them by
// 0, and 0 times NaN is NaN. Included after the device's call.h.
#pragma once
#include <array>

#include "common/torch/checks.h"

namespace flashcell {

#if !defined(CUDA_KERNEL)
// Whether all rows [H, width] of held steps in x [B, T, H, width] are below 2^32 (fp64: 2^256;
// fp16: finite), so that no product overflows; x's last stride is 1. `least` is the exponent of the
// least number that is not.
template <typename Bits>
bool has_small_held(const Tensor& x, const uint8_t* hold, Bits exponent, Bits least) {
  const Bits* data = static_cast<const Bits*>(x.const_data_ptr());
  const int64_t T = x.size(1), H = x.size(2), width = x.size(3);
  for (int64_t row = 0; row < x.size(0) * T; ++row) {
    if (!hold[row]) continue;
    for (int64_t h = 0; h < H; ++h) {
      const Bits* from = data + row / T * x.stride(0) + row % T * x.stride(1) + h * x.stride(2);
      bool is_small = true;
      for (int64_t i = 0; i < width; ++i) is_small &= (from[i] & exponent) < least;
      if (!is_small) return false;
    }
  }
  return true;
}

inline bool may_be_read(const Tensor& x, const Tensor& hold) {
  const auto* held = static_cast<const uint8_t*>(hold.const_data_ptr());
  switch (x.scalar_type()) {
    case ScalarType::Double:
      return has_small_held<uint64_t>(x, held, 0x7ff0000000000000, 0x4ff0000000000000);
    case ScalarType::Float:
      return has_small_held<uint32_t>(x, held, 0x7f800000, 0x4f800000);
    case ScalarType::BFloat16:
      return has_small_held<uint16_t>(x, held, 0x7f80, 0x4f80);
    default:
      return has_small_held<uint16_t>(x, held, 0x7c00, 0x7c00);
  }
}
#else
// On CUDA the host does not wait to find out.
inline bool may_be_read(const Tensor&, const Tensor&) { return false; }
#endif

// Returns x [B, T, H, width] in the layout that the engine reads, or a copy with zeros at held
// steps.
inline Tensor without_held(const Tensor& x, const OptionalTensor& hold) {
  if (!hold || x.numel() == 0 || may_be_read(x, *hold)) return x;
  using namespace torch::stable;
  const Tensor mask = unsqueeze(unsqueeze(*hold, 2), 3);
  const Tensor zero = new_zeros(x, {});
  std::array<StableIValue, 3> stack{detail::from(mask), detail::from(zero), detail::from(x)};
  // masked_fill would copy its value from the host to the GPU, which a CUDA graph cannot capture.
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::where", "self", stack.data(), TORCH_ABI_VERSION));
  return input(detail::to<Tensor>(stack[0]));
}

}  // namespace flashcell
