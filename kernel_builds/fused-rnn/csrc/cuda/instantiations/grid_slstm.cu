#include "chip.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(chip, Slstm)
}  // namespace flashcell::cuda
