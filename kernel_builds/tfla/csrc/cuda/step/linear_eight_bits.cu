// y = W x with weights of 8 bits, and maybe others of 16; linear.cuh says how.
#include "linear.cuh"

namespace flashcell::cuda {

template <typename IO, Eight kEight>
void run_eight_bits(const LinearStepParams& p, const Device& device, cudaStream_t stream) {
  if (device.code.is_turing()) {
    launch_linear_step<IO, kEight, kTuringSteps>(p, device, stream);
  } else if (device.shared_bytes >= kSharedOfEight) {
    launch_linear_step<IO, kEight, kShortSteps, kStagesOfEight>(p, device, stream);
  } else {
    launch_linear_step<IO, kEight, kShortSteps>(p, device, stream);
  }
}
#define FLASHCELL_RUN(IO, kind) \
  template void run_eight_bits<IO, kind>(const LinearStepParams&, const Device&, cudaStream_t)
FLASHCELL_RUN(bf16, Eight::kInt8);
FLASHCELL_RUN(fp16, Eight::kInt8);
FLASHCELL_RUN(bf16, Eight::kFp8);
FLASHCELL_RUN(fp16, Eight::kFp8);
#undef FLASHCELL_RUN

}  // namespace flashcell::cuda
