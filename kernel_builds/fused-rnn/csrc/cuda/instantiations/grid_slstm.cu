// Compiles the grid engine for the cell slstm.
#include "../grid/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(grid, Slstm)
}  // namespace flashcell::cuda
