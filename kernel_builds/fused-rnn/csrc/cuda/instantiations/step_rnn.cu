// Compiles the step engine for the cells rnn_tanh and rnn_relu.
#include "../step/launch.cuh"

namespace flashcell::cuda {
FLASHCELL_INSTANTIATE(step, RnnTanh)
FLASHCELL_INSTANTIATE(step, RnnRelu)
}  // namespace flashcell::cuda
