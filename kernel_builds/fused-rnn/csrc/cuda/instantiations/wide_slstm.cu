// Compiles the wide engine for the cell slstm.
#include "../wide/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_32(wide, Slstm)
}  // namespace flashcell::cuda
