// Compiles the backward pass whose recurrent gradient is cut for the cell slstm.
#include "../cut/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_BACKWARD(cut, Slstm)
}  // namespace flashcell::cuda
