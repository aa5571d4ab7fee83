#include "block.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(block, Lstm)
}  // namespace flashcell::cuda
