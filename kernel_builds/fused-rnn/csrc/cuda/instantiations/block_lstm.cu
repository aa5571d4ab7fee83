// Compiles the block engine for the cell lstm.
#include "../block/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(block, Lstm)
}  // namespace flashcell::cuda
