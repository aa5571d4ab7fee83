// Runs the ops on CUDA for ops.cpp. cpu/call.h has functions of the same names.
#pragma once
#include "../cells/all.h"
#include "common/torch/cuda.h"
#include "run.h"

namespace flashcell {

// Returns x in the layout that the engine reads: channels of a row are contiguous, and the bytes
// from a step to the next fit in 31 bits.
inline Tensor input(const Tensor& x) {
  const int64_t row = x.dim() - 1, time = x.dim() - 3;
  const bool dense_row = x.stride(row) == 1 || x.size(row) <= 1;
  return dense_row && x.stride(time) < int64_t(1) << 28 ? x : torch::stable::contiguous(x);
}

inline cuda::Launch prepare(Dtype dtype, int together, const Tensor& like) {
  STD_TORCH_CHECK(dtype != Dtype::kDouble, "x must be float32, float16 or bfloat16 on CUDA, got ",
                  torch::headeronly::toString(like.scalar_type()));
  return {cuda::current_device(), current_stream(like), dtype, together, nullptr};
}

// Two channels are read as one word if every such pair is aligned and within one head. All operands
// other than x are aligned.
inline cuda::Launch prepare(const SequenceParams& p, Dtype dtype, const Tensor& like) {
  const bool even = p.J % 2 == 0 && p.x_head % 2 == 0 && p.x_batch % 2 == 0 && p.x_time % 2 == 0 &&
                    p.x_gate % 2 == 0;
  const int bytes = dtype == Dtype::kFloat ? 8 : 4;
  return prepare(dtype, even && uintptr_t(p.x) % bytes == 0 ? 2 : 1, like);
}

inline Tensor scratch(const Tensor& like, int64_t bytes) {
  return new_tensor(like, {bytes}, ScalarType::Byte);
}

template <typename Cell>
void run(const ForwardParams& p, Dtype dtype, const Tensor& x) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  cuda::Launch launch = prepare(p, dtype, x);
  if (p.S * p.D == 0) return cuda::set_zero(p.report, 3 * sizeof(float), launch.stream);
  const Tensor memory = scratch(x, cuda::Engine<Cell>::forward_scratch(p, launch));
  launch.scratch = memory.mutable_data_ptr();
  cuda::Engine<Cell>::forward(p, launch);
}

template <typename Cell>
void run(const BackwardParams& p, Dtype dtype, const Tensor& x) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  cuda::Launch launch = prepare(p, dtype, x);
  if (p.S * p.D == 0) {
    const int64_t rows = int64_t(Cell::kWeights) + (p.bias == nullptr ? 0 : Cell::kGates);
    return cuda::set_zero(p.dweight, rows * p.D * sizeof(float), launch.stream);
  }
  const Tensor memory = scratch(x, cuda::Engine<Cell>::backward_scratch(p, launch));
  launch.scratch = memory.mutable_data_ptr();
  cuda::Engine<Cell>::backward(p, launch);
}

inline void run(const ConvStepParams& p, Dtype dtype, const Tensor& x) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  cuda::conv_step(p, prepare(dtype, 2, x));
}
template <typename Cell>
void run(const MixStepParams& p, Dtype dtype, const Tensor& x) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  cuda::mix_step<Cell>(p, prepare(dtype, 2, x));
}

template <typename Params>
void run_scan(const Params& p, Dtype dtype, const Tensor& like,
              void (*engine)(const Params&, const cuda::Launch&)) {
  const torch::stable::accelerator::DeviceGuard guard(like.get_device_index());
  if (p.B * p.D == 0) return;
  int together = p.n > 1 ? 1 : 8;
  while (p.D % together != 0) together /= 2;
  cuda::Launch launch = prepare(dtype, together, like);
  const Tensor memory = scratch(like, cuda::scan_scratch(p, launch));
  launch.scratch = memory.mutable_data_ptr();
  engine(p, launch);
}
inline void run(const ScanForwardParams& p, Dtype dtype, const Tensor& like) {
  run_scan(p, dtype, like, &cuda::scan_forward);
}
inline void run(const ScanBackwardParams& p, Dtype dtype, const Tensor& like) {
  run_scan(p, dtype, like, &cuda::scan_backward);
}

}  // namespace flashcell
