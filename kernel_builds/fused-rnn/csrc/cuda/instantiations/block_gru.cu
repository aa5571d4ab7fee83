#include "../block/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(block, Gru)
}  // namespace flashcell::cuda
