// Compiles the fma engine for the cell slstm.
#include "../fma/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_32(fma, Slstm)
}  // namespace flashcell::cuda
