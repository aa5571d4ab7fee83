#include "../step/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(step, RnnTanh)
FLASHCELL_INSTANTIATE(step, RnnRelu)
}  // namespace flashcell::cuda
