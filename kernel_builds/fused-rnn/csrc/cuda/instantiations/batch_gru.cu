// Compiles the batch engine for the cell gru.
#include "../batch/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_FORWARD(batch, Gru)
}  // namespace flashcell::cuda
