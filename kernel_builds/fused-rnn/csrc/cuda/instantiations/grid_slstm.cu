#include "../grid/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(chip, Slstm)
}  // namespace flashcell::cuda
