#include "../grid/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(chip, Gru)
}  // namespace flashcell::cuda
