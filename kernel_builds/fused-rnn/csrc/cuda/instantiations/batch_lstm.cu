// Compiles the batch engine for the cell lstm.
#include "../batch/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_FORWARD_16(batch, Lstm)
}  // namespace flashcell::cuda
