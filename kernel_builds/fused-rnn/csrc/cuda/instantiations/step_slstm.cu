#include "../step/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(step, Slstm)
}  // namespace flashcell::cuda
