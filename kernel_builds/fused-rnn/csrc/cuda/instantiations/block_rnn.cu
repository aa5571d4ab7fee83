// Compiles the block engine for the cells rnn_tanh and rnn_relu.
#include "../block/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(block, RnnTanh)
FLASHCELL_INSTANTIATE(block, RnnRelu)
}  // namespace flashcell::cuda
