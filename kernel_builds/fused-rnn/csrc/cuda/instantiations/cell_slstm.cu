// Compiles the kernels for one step of one layer of the cell slstm.
#include "../cell/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_CELL(Slstm)
}  // namespace flashcell::cuda
