// The operators of the causal convolution on CUDA; on the CPU torch's own convolution runs.
#pragma once
#include <tuple>

#include "../call.h"
#include "common/torch/op.h"

namespace flashcell {

// x [B,T,D] strided · weight [5,D] in the state dtype: 4 taps, then the bias · window [B,3,D] ·
// reset [B,T] bool · silu: apply it to the sum -> y [B,T,D]
inline constexpr char kConvForwardSchema[] =
    "causal_conv_fwd(Tensor x, Tensor weight, Tensor? window, Tensor? reset, bool silu) -> Tensor";
inline constexpr char kConvBackwardSchema[] =
    "causal_conv_bwd(Tensor dy, Tensor x, Tensor weight, Tensor? window, Tensor? reset, bool silu) "
    "-> (Tensor dx, Tensor dweight, Tensor dwindow)";

// The tensors of both directions, after their checks.
struct ConvArguments {
  Tensor x, weight;
  OptionalTensor window, reset;
  int64_t B, T, D;
  cuda::Launch launch;

  ConvArguments(const Tensor& given, const Tensor& given_weight, const OptionalTensor& given_window,
                const OptionalTensor& given_reset)
      : x(given), weight(given_weight) {
    check_rank(x, "x", 3, "[B, T, D]");
    if (x.stride(2) != 1) x = torch::stable::contiguous(x);
    B = x.size(0), T = x.size(1), D = x.size(2);
    weight = operand(given_weight, "weight", {ConvParams::kTaps + 1, D}, state_dtype(x));
    window = operand(given_window, "window", {B, ConvParams::kTaps - 1, D}, x.scalar_type());
    reset = operand(given_reset, "reset", {B, T}, ScalarType::Bool);
    const Dtype dtype = io_dtype(x, "x");
    const int wide = dtype == Dtype::kFloat ? 2 : 4;
    const bool whole = D % wide == 0 && x.stride(0) % wide == 0 && x.stride(1) % wide == 0 &&
                       uintptr_t(x.const_data_ptr()) % 8 == 0;
    launch = prepare(dtype, whole ? wide : 1, x);
  }

  void fill(ConvParams& p, bool silu) const {
    p.B = B, p.T = T, p.D = D, p.silu = silu;
    p.x = x.const_data_ptr(), p.x_batch = x.stride(0), p.x_time = x.stride(1);
    p.weight = weight.const_data_ptr(), p.window = pointer(window);
    p.reset = (const uint8_t*)pointer(reset);
  }
};

inline Tensor conv_forward(Tensor x, Tensor weight, OptionalTensor window, OptionalTensor reset,
                           bool silu) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const ConvArguments given(x, weight, window, reset);
  Tensor y = new_tensor(x, shape_of(x), x.scalar_type());
  ConvForwardParams params{};
  given.fill(params, silu);
  params.y = y.mutable_data_ptr();
  if (y.numel() > 0) cuda::conv_forward(params, given.launch);
  return y;
}

inline std::tuple<Tensor, Tensor, Tensor> conv_backward(Tensor dy, Tensor x, Tensor weight,
                                                        OptionalTensor window, OptionalTensor reset,
                                                        bool silu) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const ConvArguments given(x, weight, window, reset);
  dy = operand(dy, "dy", shape_of(x), x.scalar_type());
  Tensor dx = new_tensor(x, shape_of(x), x.scalar_type());
  Tensor dweight = new_tensor(x, shape_of(weight), weight.scalar_type());
  Tensor dwindow = new_tensor(x, {given.B, ConvParams::kTaps - 1, given.D}, x.scalar_type());
  ConvBackwardParams params{};
  given.fill(params, silu);
  params.dy = dy.const_data_ptr(), params.dx = dx.mutable_data_ptr();
  params.dweight = dweight.mutable_data_ptr(), params.dwindow = dwindow.mutable_data_ptr();
  const Tensor memory = scratch(x, cuda::conv_scratch(params));
  cuda::Launch launch = given.launch;
  launch.scratch = memory.mutable_data_ptr();
  if (given.T == 0) {
    const int64_t bytes = dwindow.numel() * dwindow.element_size();
    cuda::set_zero(params.dwindow, bytes, launch.stream);
  }
  cuda::conv_backward(params, launch);
  return {dx, dweight, dwindow};
}

inline void define_conv(torch::stable::detail::StableLibrary& ops) {
  ops.def(kConvForwardSchema), ops.def(kConvBackwardSchema);
}
inline void implement_conv(torch::stable::detail::StableLibrary& ops) {
  ops.impl("causal_conv_fwd", FLASHCELL_OP(kConvForwardSchema, conv_forward));
  ops.impl("causal_conv_bwd", FLASHCELL_OP(kConvBackwardSchema, conv_backward));
}

}  // namespace flashcell
