// Compiles the wide engine for the cell lstm.
#include "../wide/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_32(wide, Lstm)
}  // namespace flashcell::cuda
