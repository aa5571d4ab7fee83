// Compiles the wide engine for the cell gru.
#include "../wide/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_32(wide, Gru)
}  // namespace flashcell::cuda
