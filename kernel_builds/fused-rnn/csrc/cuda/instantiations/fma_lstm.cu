// Compiles the fma engine for the cell lstm.
#include "../fma/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_32(fma, Lstm)
}  // namespace flashcell::cuda
