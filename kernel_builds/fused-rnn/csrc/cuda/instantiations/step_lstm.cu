#include "step.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(step, Lstm)
}  // namespace flashcell::cuda
