// Compiles the backward pass whose recurrent gradient is cut for the cells rnn_tanh and rnn_relu.
#include "../cut/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_BACKWARD(cut, RnnTanh)
FLASHCELL_INSTANTIATE_BACKWARD(cut, RnnRelu)
}  // namespace flashcell::cuda
