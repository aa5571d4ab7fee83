// Compiles the grid engine for the cell lstm.
#include "../grid/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(grid, Lstm)
}  // namespace flashcell::cuda
