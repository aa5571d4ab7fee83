#include "states.cuh"

namespace flashcell::cuda {

int64_t states_scratch(const StateParams& p, int processors) {
  Arrays arrays(nullptr);
  take_segments(p, processors, arrays);
  return arrays.bytes();
}

#define FLASHCELL_INSTANTIATE(IO)                                                    \
  template void run_states<IO, false>(const StateParams&, int, void*, cudaStream_t); \
  template void run_states<IO, true>(const StateParams&, int, void*, cudaStream_t);
FLASHCELL_INSTANTIATE(bf16)
FLASHCELL_INSTANTIATE(fp16)
FLASHCELL_INSTANTIATE(float)
#undef FLASHCELL_INSTANTIATE

}  // namespace flashcell::cuda
