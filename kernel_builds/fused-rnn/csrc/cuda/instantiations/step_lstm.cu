// Compiles the step engine for the cell lstm.
#include "../step/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(step, Lstm)
}  // namespace flashcell::cuda
