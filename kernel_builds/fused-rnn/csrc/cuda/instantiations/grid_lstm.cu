#include "../grid/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(chip, Lstm)
}  // namespace flashcell::cuda
