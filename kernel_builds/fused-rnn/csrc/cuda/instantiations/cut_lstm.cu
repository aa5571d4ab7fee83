// Compiles the backward pass whose recurrent gradient is cut for the cell lstm.
#include "../cut/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_BACKWARD(cut, Lstm)
}  // namespace flashcell::cuda
