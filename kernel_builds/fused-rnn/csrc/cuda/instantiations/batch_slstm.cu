// Compiles the batch engine for the cell slstm.
#include "../batch/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_FORWARD(batch, Slstm)
}  // namespace flashcell::cuda
