// Compiles the grid engine for the cell gru.
#include "../grid/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(grid, Gru)
}  // namespace flashcell::cuda
