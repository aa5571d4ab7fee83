// Compiles the batch engine for the cell lstm.
#include "../batch/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_FORWARD(batch, Lstm)
}  // namespace flashcell::cuda
