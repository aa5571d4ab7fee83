// Runs the ops on CUDA for ops.cpp. cpu/call.h has functions of the same names.
#pragma once
#include "common/torch/cuda.h"
#include "run.h"

namespace flashcell {

// Returns x in the layout that the engine reads: every row of a head starts at a multiple of 16
// bytes.
inline Tensor input(const Tensor& x) {
  const int64_t vector = 16 / x.element_size(), last = x.dim() - 1;
  bool aligned = x.stride(last) == 1 && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  for (int64_t i = 0; i < last; ++i) aligned &= x.size(i) <= 1 || x.stride(i) % vector == 0;
  return aligned ? x : dense(torch::stable::contiguous(x));
}

template <typename Params>
void run(const Params& p, Dtype dtype, const Tensor& like) {
  STD_TORCH_CHECK(dtype != Dtype::kDouble, "k must be float32, float16 or bfloat16 on CUDA, got ",
                  torch::headeronly::toString(like.scalar_type()));
  const torch::stable::accelerator::DeviceGuard guard(like.get_device_index());
  cuda::Launch launch{cuda::current_device(), dtype, current_stream(like), nullptr};
  const Tensor scratch = new_tensor(like, {cuda::scratch_bytes(p, launch)}, ScalarType::Byte);
  launch.scratch = scratch.mutable_data_ptr();
  cuda::run(p, launch);
}

}  // namespace flashcell
