// Compiles the step engine for the cell gru.
#include "../step/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(step, Gru)
}  // namespace flashcell::cuda
