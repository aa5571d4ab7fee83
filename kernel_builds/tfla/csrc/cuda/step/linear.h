// Declares the layers between two mLSTM steps of a model, for one token per row, on CUDA in 16
// bits.
#pragma once
#include "../run.h"

namespace flashcell::cuda {

template <typename IO>
void run_linear_step(const LinearStepParams& p, const Device& device, cudaStream_t stream);

// The same where the matrices with scales are of format kFormat; `run_linear_step` calls it.
template <typename IO, Format kFormat>
void run_quantized(const LinearStepParams& p, const Device& device, cudaStream_t stream);

template <typename IO>
void run_norm_step(const NormStepParams& p, const Device& device, cudaStream_t stream);
template <typename IO>
void run_gate_step(const GateStepParams& p, const Device& device, cudaStream_t stream);

}  // namespace flashcell::cuda
