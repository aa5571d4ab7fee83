// Compiles the kernels for one step of one layer of the cell lstm.
#include "../cell/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_CELL(Lstm)
}  // namespace flashcell::cuda
