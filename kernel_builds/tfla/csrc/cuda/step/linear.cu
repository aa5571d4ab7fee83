// y = W x with weights of 16 bits; linear.cuh says how.
#include "linear.cuh"

namespace flashcell::cuda {

template <typename IO>
void run_linear_step(const LinearStepParams& p, const Device& device, cudaStream_t stream) {
  constexpr Format kPlain = Format::kPlain;
  if (p.format == Format::kInt8) return run_quantized<IO, Format::kInt8>(p, device, stream);
  if (p.format == Format::kFp8) return run_quantized<IO, Format::kFp8>(p, device, stream);
  if (p.format == Format::kInt4) return run_quantized<IO, Format::kInt4>(p, device, stream);
  if (device.code.is_turing()) {
    launch_linear_step<IO, kPlain, kTuringSteps>(p, device, stream);
  } else if (device.shared_bytes >= kSharedOfLong) {
    launch_linear_step<IO, kPlain, kLongSteps>(p, device, stream);
  } else {
    launch_linear_step<IO, kPlain, kShortSteps>(p, device, stream);
  }
}
template void run_linear_step<bf16>(const LinearStepParams&, const Device&, cudaStream_t);
template void run_linear_step<fp16>(const LinearStepParams&, const Device&, cudaStream_t);

}  // namespace flashcell::cuda
