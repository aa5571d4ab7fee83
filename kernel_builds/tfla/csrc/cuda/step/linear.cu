// y = W x with weights of 16 bits; linear.cuh says how.
#include "linear.cuh"

namespace flashcell::cuda {

template void launch_linear_step<bf16, Format::kPlain>(const LinearStepParams&, const Device&,
                                                       cudaStream_t);
template void launch_linear_step<fp16, Format::kPlain>(const LinearStepParams&, const Device&,
                                                       cudaStream_t);

}  // namespace flashcell::cuda
