// Declares the layers between two mLSTM steps of a model, for one token per row, on CUDA in 16
// bits.
#pragma once
#include "../run.h"

namespace flashcell::cuda {

// Runs it where the matrices with scales are of format kFormat.
template <typename IO, Format kFormat>
void launch_linear_step(const LinearStepParams& p, const Device& device, cudaStream_t stream);

template <typename IO>
void run_linear_step(const LinearStepParams& p, const Device& device, cudaStream_t stream) {
  switch (p.format) {
    case Format::kPlain:
      return launch_linear_step<IO, Format::kPlain>(p, device, stream);
    case Format::kInt8:
      return launch_linear_step<IO, Format::kInt8>(p, device, stream);
    case Format::kFp8:
      return launch_linear_step<IO, Format::kFp8>(p, device, stream);
    case Format::kInt4:
      return launch_linear_step<IO, Format::kInt4>(p, device, stream);
  }
}

template <typename IO>
void run_norm_step(const NormStepParams& p, const Device& device, cudaStream_t stream);
template <typename IO>
void run_gate_step(const GateStepParams& p, const Device& device, cudaStream_t stream);

}  // namespace flashcell::cuda
