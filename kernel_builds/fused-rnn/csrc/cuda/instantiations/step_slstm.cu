// Compiles the step engine for the cell slstm.
#include "../step/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(step, Slstm)
}  // namespace flashcell::cuda
