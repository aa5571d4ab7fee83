#include "../grid/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(grid, Slstm)
}  // namespace flashcell::cuda
