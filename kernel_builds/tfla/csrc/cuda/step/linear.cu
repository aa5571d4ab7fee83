// y = W x with weights of 16 bits; linear.cuh says how.
#include "linear.cuh"

namespace flashcell::cuda {

template <typename IO>
void run_linear_step(const LinearStepParams& p, const Device& device, cudaStream_t stream) {
  constexpr Eight kNone = Eight::kNone;
  if (p.eight == Eight::kInt8) return run_eight_bits<IO, Eight::kInt8>(p, device, stream);
  if (p.eight == Eight::kFp8) return run_eight_bits<IO, Eight::kFp8>(p, device, stream);
  if (device.code.is_turing()) {
    launch_linear_step<IO, kNone, kTuringSteps>(p, device, stream);
  } else if (device.shared_bytes >= kSharedOfLong) {
    launch_linear_step<IO, kNone, kLongSteps>(p, device, stream);
  } else {
    launch_linear_step<IO, kNone, kShortSteps>(p, device, stream);
  }
}
template void run_linear_step<bf16>(const LinearStepParams&, const Device&, cudaStream_t);
template void run_linear_step<fp16>(const LinearStepParams&, const Device&, cudaStream_t);

}  // namespace flashcell::cuda
