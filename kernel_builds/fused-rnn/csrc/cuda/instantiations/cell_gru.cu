// Compiles the kernels for one step of one layer of the cell gru.
#include "../cell/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_CELL(Gru)
}  // namespace flashcell::cuda
