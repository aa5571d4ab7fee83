// Compiles the backward pass whose recurrent gradient is cut for the cell gru.
#include "../cut/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_BACKWARD(cut, Gru)
}  // namespace flashcell::cuda
