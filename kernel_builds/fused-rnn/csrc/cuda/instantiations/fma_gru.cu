// Compiles the fma engine for the cell gru.
#include "../fma/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_32(fma, Gru)
}  // namespace flashcell::cuda
