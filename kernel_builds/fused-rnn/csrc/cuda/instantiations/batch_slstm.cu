// Compiles the batch engine for the cell slstm.
#include "../batch/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_FORWARD_16(batch, Slstm)
}  // namespace flashcell::cuda
