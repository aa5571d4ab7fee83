#include "../block/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(block, RnnTanh)
FLASHCELL_INSTANTIATE(block, RnnRelu)
}  // namespace flashcell::cuda
