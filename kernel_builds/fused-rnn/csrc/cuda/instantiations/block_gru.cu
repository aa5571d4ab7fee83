// Compiles the block engine for the cell gru.
#include "../block/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(block, Gru)
}  // namespace flashcell::cuda
