// y = W x with weights of 8 or 4 bits, and maybe others of 16; linear.cuh says how.
#include "linear.cuh"

namespace flashcell::cuda {

#define FLASHCELL_LAUNCH(IO, kind) \
  template void launch_linear_step<IO, kind>(const LinearStepParams&, const Device&, cudaStream_t)
FLASHCELL_LAUNCH(bf16, Format::kInt8);
FLASHCELL_LAUNCH(fp16, Format::kInt8);
FLASHCELL_LAUNCH(bf16, Format::kFp8);
FLASHCELL_LAUNCH(fp16, Format::kFp8);
FLASHCELL_LAUNCH(bf16, Format::kInt4);
FLASHCELL_LAUNCH(fp16, Format::kInt4);
#undef FLASHCELL_LAUNCH

}  // namespace flashcell::cuda
