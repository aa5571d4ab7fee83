#include "../grid/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(chip, RnnTanh)
FLASHCELL_INSTANTIATE(chip, RnnRelu)
}  // namespace flashcell::cuda
