// Compiles the kernels for one step of one layer of the cells rnn_tanh and rnn_relu.
#include "../cell/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE_CELL(RnnTanh)
FLASHCELL_INSTANTIATE_CELL(RnnRelu)
}  // namespace flashcell::cuda
