// y = W x with weights of 8 or 4 bits, and maybe others of 16; linear.cuh says how.
#include "linear.cuh"

namespace flashcell::cuda {

template <typename IO, Format kFormat>
void run_quantized(const LinearStepParams& p, const Device& device, cudaStream_t stream) {
  constexpr bool kInt4 = kFormat == Format::kInt4;
  constexpr int kSteps = kInt4 ? kInt4Steps : kShortSteps;
  if (device.code.is_turing()) {
    launch_linear_step<IO, kFormat, kTuringSteps>(p, device, stream);
  } else if (device.shared_bytes >= kSharedOfTeams) {
    constexpr int kStages = kInt4 ? kInt4Stages : kStagesOfEight;
    launch_linear_step<IO, kFormat, kSteps, kStages, kTeamsOfWidening>(p, device, stream);
  } else {
    launch_linear_step<IO, kFormat, kSteps, kInt4 ? kShortInt4Stages : 2>(p, device, stream);
  }
}
#define FLASHCELL_RUN(IO, kind) \
  template void run_quantized<IO, kind>(const LinearStepParams&, const Device&, cudaStream_t)
FLASHCELL_RUN(bf16, Format::kInt8);
FLASHCELL_RUN(fp16, Format::kInt8);
FLASHCELL_RUN(bf16, Format::kFp8);
FLASHCELL_RUN(fp16, Format::kFp8);
FLASHCELL_RUN(bf16, Format::kInt4);
FLASHCELL_RUN(fp16, Format::kInt4);
#undef FLASHCELL_RUN

}  // namespace flashcell::cuda
