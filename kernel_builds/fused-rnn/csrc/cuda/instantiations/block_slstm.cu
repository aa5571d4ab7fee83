// Compiles the block engine for the cell slstm.
#include "../block/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(block, Slstm)
}  // namespace flashcell::cuda
