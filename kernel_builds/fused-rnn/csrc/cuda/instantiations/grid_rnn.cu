// Compiles the grid engine for the cells rnn_tanh and rnn_relu.
#include "../grid/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(grid, RnnTanh)
FLASHCELL_INSTANTIATE(grid, RnnRelu)
}  // namespace flashcell::cuda
